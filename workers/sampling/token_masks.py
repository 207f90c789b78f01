"""Token masks of a batch: for each row, packed bits of the tokens that it may sample next.

The masks of a step can be filled on a second thread while the model computes: `begin` starts this
once the tokens of all earlier steps are committed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from penstock.common.grammar.matcher import (
    BITS,
    CompiledGrammar,
    Words,
    fill_masks,
    num_words,
)
from penstock.common.sampling_params import SamplingParams
from penstock.workers.gpu.pinned import usable_cores
from penstock.workers.sampling.fill_thread import FillThread, Result
from penstock.workers.sampling.mask_processors import (
    NEVER,
    GrammarMask,
    MaskProcessor,
    can_force,
    mask_processors,
    only_tokens,
)
from penstock.workers.scheduling.forced_tokens import NO_FORCED, ForcedTokens
from penstock.workers.scheduling.sequence import Bools, Ints

RowIndices: TypeAlias = npt.NDArray[np.intp]

MAX_FORCED = 16
"""Default of `TokenMasks.max_forced`."""

MAX_THREADS = 8
"""Maximum number of threads that fill the masks of one step."""


class History(Protocol):
    """Interface to the prompts and answers so far of R rows; implemented by the sequence table."""

    @property
    def tokens(self) -> Ints: ...  # [R, L] tokens of each row: the prompt, then the answer

    @property
    def num_tokens(self) -> Ints: ...  # [R] number of tokens of prompt and answer

    @property
    def num_prompt(self) -> Ints: ...  # [R] number of tokens of the prompt


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step's S rows of logits; M of the rows have a mask of W words."""

    at: RowIndices  # [M] indices of the rows that have a mask
    words: Words  # [M, W] masks of these rows
    is_single: Bools  # [M] True if a grammar allows only one token
    # for some rows whose mask allows only one token, the tokens that must follow this token
    forced: ForcedTokens = field(default_factory=dict)
    # Table rows with a processor whose `is_done` is True, each with all processors of the row.
    done: Sequence[tuple[int, tuple[MaskProcessor, ...]]] = ()


class _Log(NamedTuple):
    """Mask processors of one row, with its prompt and answer so far."""

    row: int
    processors: tuple[MaskProcessor, ...]
    token_index: int
    tokens: Ints
    num_prompt: int


class TokenMasks:
    """The mask processors of all rows of the sequence table.

    Attributes:
        max_forced: maximum number of forced tokens of a sequence in one step, in addition to the
            sampled token. Answers do not depend on this limit.
    """

    def __init__(self, num_rows: int, vocab_size: int, max_forced: int = MAX_FORCED) -> None:
        self.max_forced = max_forced
        self._rows: list[tuple[MaskProcessor, ...]] = [()] * num_rows
        self._min_tokens = np.zeros(num_rows, np.int64)
        # For each row, whether its token log (prompt and answer so far) only grows. False if the
        # row is a beam, because the beam search replaces the beam's log.
        self._keeps_log = np.zeros(num_rows, np.bool_)
        self._until = np.zeros(num_rows, np.int64)  # answer index from which a row has no mask
        # answer index from which a row's mask depends on its tokens
        self._reads_log_from = np.full(num_rows, NEVER)
        self._can_force = np.zeros(num_rows, np.bool_)
        self._vocab_size = vocab_size
        self._num_words = num_words(vocab_size)
        self._begun: tuple[bytes, bytes, Result[StepMasks | None]] | None = None
        self._thread: FillThread[StepMasks | None] | None = None
        self._executor: LLExecutor | None = None

    def admit(self, row: int, params: SamplingParams, grammar: CompiledGrammar | None) -> None:
        """Set the masks of a row of the sequence table for a new sequence.

        Token ids in `params`, except stop tokens, must be within the vocabulary.
        """
        most = self._num_words if grammar is None else max(self._num_words, grammar.num_words)
        processors = mask_processors(params, self._vocab_size, most, grammar)
        self._num_words = most
        self._min_tokens[row] = params.min_tokens
        self._keeps_log[row] = not params.use_beam_search
        self._can_force[row] = can_force(params, processors)
        self._set_processors(row, processors)

    def is_masked(self, rows: Ints, indices: Ints) -> Bools:
        """Return a mask [S]: True for rows that may have a token mask at these answer indices."""
        masked: Bools = indices < self._until[rows]
        return masked

    def reads_log(self, rows: Ints, indices: Ints) -> bool:
        """Return whether any row's mask depends on the row's tokens, not only on their number.

        indices: [S] answer index of the token to sample in each row.
        """
        return bool((indices >= self._reads_log_from[rows]).any())

    def begin(self, rows: Ints, indices: Ints, history: History) -> None:
        """Start to fill the masks of a step on another thread, if any mask depends on tokens.

        All earlier steps must be committed. `take` must follow, with the same arguments.
        """
        if not self.reads_log(rows, indices):
            return
        if self._thread is None:
            self._thread = FillThread()
        fill = self._prepare(rows, indices, history)
        self._begun = rows.tobytes(), indices.tobytes(), self._thread.start(fill)

    def take(self, rows: Ints, indices: Ints, history: History) -> StepMasks | None:
        """Return the masks of a step; None if no row has a mask.

        Args:
            rows: [S] sequence-table row of each row of logits.
            indices: [S] answer index, from 0, of the token to sample in each row.
            history: prompts and answers so far of all rows of the sequence table.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            masks = begun[2].wait()
            if begun[0] == rows.tobytes() and begun[1] == indices.tobytes():
                return self._remove_done(masks)
        if not self.is_masked(rows, indices).any():
            return None
        return self._remove_done(self._prepare(rows, indices, history)())

    def _set_processors(self, row: int, processors: tuple[MaskProcessor, ...]) -> None:
        is_always = any(processor.is_active(NEVER) for processor in processors)
        self._until[row] = NEVER if is_always else self._min_tokens[row] if processors else 0
        self._reads_log_from[row] = min((each.reads_log_from for each in processors), default=NEVER)
        self._rows[row] = processors

    def _remove_done(self, masks: StepMasks | None) -> StepMasks | None:
        """Remove finished processors from their rows; return `masks`.

        A row that has no processors left is unconstrained.
        """
        for row, processors in () if masks is None else masks.done:
            if self._keeps_log[row] and self._rows[row] is processors:
                self._set_processors(row, tuple(each for each in processors if not each.is_done))
        return masks

    def _prepare(
        self, rows: Ints, indices: Ints, history: History
    ) -> Callable[[], StepMasks | None]:
        """Return a function that fills the masks of a step on any thread: see `_fill`.

        The function works on copies of the rows' processors and limits and of the sequences'
        lengths, because `admit` may change these while the function runs.
        """
        processors = [self._rows[row] for row in rows.tolist()]
        lengths = history.num_tokens[rows], history.num_prompt[rows]
        columns = rows, indices, self._until[rows], *lengths
        return partial(self._fill, processors, columns, history.tokens)

    def _fill(
        self,
        processors: Sequence[tuple[MaskProcessor, ...]],
        columns: Sequence[npt.NDArray[np.integer]],
        tokens: Ints,
    ) -> StepMasks | None:
        """Fill the masks of S rows of logits; return None if no row has a mask.

        Args:
            processors: [S] mask processors of each row.
            columns: five arrays [S]: row of the sequence table, answer index, index from which the
                row has no mask, length of prompt and answer, length of the prompt.
            tokens: prompts and answers of all rows of the sequence table.
        """
        masked, logs = list[int](), list[_Log]()
        values = zip(*(column.tolist() for column in columns), strict=True)
        for at, (row, index, until, length, num_prompt) in enumerate(values):
            if index < until and any(each.is_active(index) for each in processors[at]):
                masked.append(at)
                text = tokens[row, :length]
                logs.append(_Log(row, processors[at], index, text, num_prompt))
        if not masked:
            return None
        words, is_single, forced = self._fill_grammars(logs)
        done = list[tuple[int, tuple[MaskProcessor, ...]]]()
        for mask, log in zip(words, logs, strict=True):
            for processor in log.processors:
                if processor.is_active(log.token_index) and not isinstance(processor, GrammarMask):
                    processor.exclude(mask, log.tokens, log.num_prompt)
                    if processor.is_done:
                        done.append((log.row, log.processors))
        return StepMasks(np.array(masked, np.intp), words, is_single, forced, done)

    def _fill_grammars(self, logs: Sequence[_Log]) -> tuple[Words, Bools, ForcedTokens]:
        """Fill the masks of all grammars together; a grammar is always its row's first processor.

        Return three items: the masks [M, W], which allow all tokens in rows without a grammar; a
        mask [M], True for rows that allow a single token; and the tokens that must follow this
        token.
        """
        is_single = np.zeros(len(logs), np.bool_)
        found = [
            (at, log.processors[0], log)
            for at, log in enumerate(logs)
            if isinstance(log.processors[0], GrammarMask)
        ]
        for _, mask, log in found:
            mask.advance(log.tokens, log.num_prompt)
        filled = self._fill_unknown([mask for _, mask, _ in found])
        singles = [(at, mask, log) for at, mask, log in found if mask.single is not None]
        if filled is not None and len(filled) == len(logs) and _are_final(logs, singles):
            # Return the masks without a copy, because no later code changes them.
            return filled, is_single, NO_FORCED
        if self.max_forced:
            able = self._can_force
            self._consume_forced([mask for _, mask, log in singles if able[log.row]])
        words = np.full((len(logs), self._num_words), -1, np.int32)
        forced: dict[int, Sequence[int]] = {}
        for at, mask, _ in found:
            mask.allowed(words[at])
        for at, mask, log in singles:
            is_single[at] = True
            known = mask.forced() if self.max_forced and self._can_force[log.row] else []
            if len(known) > 1:
                forced[log.row] = known[1 : self.max_forced + 1]
        return words, is_single, forced

    def _fill_unknown(self, masks: Sequence[GrammarMask]) -> Words | None:
        """Fill the masks that `masks` lack; return them [n, W], or None if none is missing."""
        masks = [mask for mask in masks if mask.needs_fill]
        if not masks:
            return None
        # With only one thread, an executor has no benefit, and passing the work to it costs time.
        if self._executor is None and len(masks) > 1 and _num_threads() > 1:
            self._executor = LLExecutor(_num_threads())
        filled = np.empty((len(masks), self._num_words), np.int32)
        fill_masks([mask.matcher for mask in masks], filled, self._executor)
        # If the tokenizer has more tokens than the model, exclude the additional tokens.
        word, bit = divmod(self._vocab_size, BITS)
        filled[:, word : word + 1] &= (1 << bit) - 1
        filled[:, word + 1 :] = 0
        for mask, words, only in zip(masks, filled, only_tokens(filled), strict=True):
            mask.keep(words, only)
        return filled

    def _consume_forced(self, masks: Sequence[GrammarMask]) -> None:
        """Let grammars consume the forced tokens, and fill the mask that follows each token."""
        for _ in range(self.max_forced + 1):
            if not masks:
                return
            masks = [mask for mask in masks if mask.consume_forced()]
            self._fill_unknown(masks)


def _are_final(logs: Sequence[_Log], singles: Sequence[object]) -> bool:
    """Return whether the masks of the grammars are final.

    They are final if no mask allows only a single token, and rows have no other processors.
    """
    return not singles and all(len(log.processors) == 1 for log in logs)


@cache
def _num_threads() -> int:
    """Return the number of threads that fill the masks of one step."""
    return min(MAX_THREADS, int(usable_cores()) // 2)
