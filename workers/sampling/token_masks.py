"""The masks of a whole batch: packed bits of the tokens that each row may sample next.

The masks of a step can be filled on a second thread while the model computes: `begin` starts this
once the tokens of all earlier steps are committed.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from penstock.common.grammar.matcher import CompiledGrammar, Words, fill_masks, num_words
from penstock.common.sampling_params import SamplingParams
from penstock.workers.sampling.mask_processors import GrammarMask, MaskProcessor, mask_processors
from penstock.workers.scheduling.sequence import Bools, Ints

RowIndices: TypeAlias = npt.NDArray[np.intp]

MAX_THREADS = 8
"""Maximum number of threads that fill the masks of one step."""


class History(Protocol):
    """Interface to prompts and answers so far; implemented by the scheduler's sequence table."""

    @property
    def tokens(self) -> Ints: ...  # [R, L] prompt, then answer, of each row

    @property
    def num_tokens(self) -> Ints: ...  # [R] prompt and answer

    @property
    def num_prompt(self) -> Ints: ...  # [R] prompt only


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of S rows of logits."""

    at: RowIndices  # [M] indices of the rows that have a mask
    words: Words  # [M, W] their masks


@dataclass(frozen=True, slots=True)
class _Log:
    """Mask processors of one row, with its prompt and answer so far."""

    processors: Sequence[MaskProcessor]
    index: int
    tokens: Ints
    num_prompt: int


class TokenMasks:
    """The mask processors of all rows of the sequence table."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._rows: list[tuple[MaskProcessor, ...]] = [()] * num_rows
        self._until = np.zeros(num_rows, np.int64)  # rows have a mask for answer indices below this
        self._reads_log = np.zeros(num_rows, np.bool_)
        self._vocab_size = vocab_size
        self._num_words = num_words(vocab_size)
        self._begun: tuple[Ints, Ints, Future[StepMasks]] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def admit(self, row: int, params: SamplingParams, grammar: CompiledGrammar | None) -> None:
        """Set the masks of a row of the sequence table for a new sequence.

        Token ids in `params`, except stop tokens, must be within the vocabulary.
        """
        most = self._num_words if grammar is None else max(self._num_words, grammar.num_words)
        processors = mask_processors(params, self._vocab_size, most, grammar)
        self._num_words = most
        is_always = any(processor.is_active(params.min_tokens) for processor in processors)
        self._until[row] = np.iinfo(np.int64).max if is_always else params.min_tokens
        if not processors:
            self._until[row] = 0
        self._reads_log[row] = any(processor.reads_log for processor in processors)
        self._rows[row] = processors

    def is_masked(self, rows: Ints, indices: Ints) -> Bools:
        """Return [S] whether the rows have a mask at these answer indices."""
        masked: Bools = indices < self._until[rows]
        return masked

    def reads_log(self, rows: Ints) -> bool:
        """Return whether the mask of a row depends on its tokens, not only on their number."""
        return bool(self._reads_log[rows].any())

    def begin(self, rows: Ints, indices: Ints, history: History) -> None:
        """Start to fill the masks of a step on another thread, if any mask depends on tokens.

        All earlier steps must be committed. `take` must follow, with the same arguments.
        """
        if not self.reads_log(rows):
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "masks")
        masked = np.flatnonzero(self.is_masked(rows, indices))
        logs = self._logs(rows[masked], indices[masked], history)
        self._begun = rows, indices, self._thread.submit(self._fill, masked, logs)

    def take(self, rows: Ints, indices: Ints, history: History) -> StepMasks | None:
        """Return the masks of a step; None if no row has a mask.

        Args:
            rows: [S] sequence-table row of each row of logits.
            indices: [S] index of the token to sample in its answer, from 0.
            history: prompts and answers so far of all rows of the sequence table.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            masks = begun[2].result()
            if np.array_equal(begun[0], rows) and np.array_equal(begun[1], indices):
                return masks
        masked = np.flatnonzero(self.is_masked(rows, indices))
        if not len(masked):
            return None
        return self._fill(masked, self._logs(rows[masked], indices[masked], history))

    def _logs(self, rows: Ints, indices: Ints, history: History) -> list[_Log]:
        lengths, prompts = history.num_tokens[rows].tolist(), history.num_prompt[rows].tolist()
        columns = zip(rows.tolist(), indices.tolist(), lengths, prompts, strict=True)
        return [
            _Log(self._rows[row], index, history.tokens[row, :length], prompt)
            for row, index, length, prompt in columns
        ]

    def _fill(self, at: RowIndices, logs: Sequence[_Log]) -> StepMasks:
        words = np.full((len(logs), self._num_words), -1, np.int32)
        self._fill_grammars(words, logs)
        for row, log in zip(words, logs, strict=True):
            for processor in log.processors:
                if processor.is_active(log.index) and not isinstance(processor, GrammarMask):
                    processor.exclude(row, log.tokens, log.num_prompt)
        return StepMasks(at, words)

    def _fill_grammars(self, words: Words, logs: Sequence[_Log]) -> None:
        """Fill the masks of all grammars at once; a grammar is a row's first processor."""
        found = [
            (at, log.processors[0], log)
            for at, log in enumerate(logs)
            if isinstance(log.processors[0], GrammarMask)
        ]
        if not found:
            return
        for _, mask, log in found:
            mask.advance(log.tokens, log.num_prompt)
        if self._executor is None and len(found) > 1:
            self._executor = LLExecutor(min(MAX_THREADS, max((os.cpu_count() or 2) // 2, 1)))
        filled = np.empty((len(found), words.shape[1]), np.int32)
        fill_masks([mask.matcher for _, mask, _ in found], filled, self._executor)
        words[[at for at, _, _ in found]] = filled
