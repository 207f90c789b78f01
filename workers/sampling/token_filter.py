"""Token filters of a sequence: allowed tokens, bad words, and stop tokens before `min_tokens`.

The last token of a bad word is excluded if prompt and answer so far end with all previous tokens of
the bad word. A bad word of one token is always excluded.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.common.sampling_params import SamplingParams
from penstock.workers.scheduling.sequence import Ints

Tokens: TypeAlias = npt.NDArray[np.int64]
RowIndices: TypeAlias = npt.NDArray[np.intp]

WILDCARD = -1  # in a pattern: matches any token, and also BEFORE_START
BEFORE_START = -2  # in place of a token: the position is before the first token of the sequence

NO_TOKENS: Tokens = np.empty(0, np.int64)
NO_PATTERNS: Tokens = np.empty((0, 1), np.int64)


class History(Protocol):
    """Interface to prompts and answers so far; implemented by the scheduler's sequence table."""

    @property
    def tokens(self) -> Ints: ...  # [R, L] prompt, then answer, of each row

    @property
    def num_tokens(self) -> Ints: ...  # [R] prompt and answer

    @property
    def num_prompt(self) -> Ints: ...  # [R] prompt only


class TokenFilter:
    """Token filters of all rows of the sequence table, stored on the host."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._stops = [NO_TOKENS] * num_rows
        self._allowed = [NO_TOKENS] * num_rows
        self._patterns = [NO_PATTERNS] * num_rows  # per row: [bad words, longest], right-aligned
        self._vocab_size = vocab_size
        self._device = device

    def admit(self, row: int, params: SamplingParams) -> None:
        """Set the filters of a row of the sequence table for a new sequence.

        Token ids in `params`, except stop tokens, must be within the vocabulary.
        """
        stops = np.array(params.stop_token_ids, np.int64)
        self._stops[row] = stops[(stops >= 0) & (stops < self._vocab_size)]
        self._allowed[row] = np.unique(np.array(params.allowed_token_ids or (), np.int64))
        self._patterns[row] = _right_aligned(params.bad_words_token_ids)

    def can_stop(self, row: int) -> bool:
        """Return whether the row has stop tokens within the vocabulary."""
        return len(self._stops[row]) > 0

    def mask_stop_tokens_(self, logits: Tensor, rows: Ints, at: RowIndices) -> None:
        """Exclude the stop tokens in the rows `at` of the logits, in place.

        Args:
            logits: [S, V].
            rows: [S] sequence-table row of each row of logits.
            at: indices of the rows of logits to change.
        """
        self._mask_(logits, *_row_token_pairs([self._stops[row] for row in rows[at]], at))

    def apply_(self, logits: Tensor, rows: Ints, at: RowIndices, history: History) -> None:
        """In the rows `at` of the logits, exclude bad words and tokens that are not allowed."""
        self._mask_all_but_allowed_(logits, rows, at)
        self._mask_bad_words_(logits, rows, at, history)

    def _mask_all_but_allowed_(self, logits: Tensor, rows: Ints, at: RowIndices) -> None:
        choosing = np.array([index for index in at if len(self._allowed[rows[index]])], np.intp)
        if not len(choosing):
            return
        lists = [self._allowed[row] for row in rows[choosing]]
        row_indices, tokens = _row_token_pairs(lists, choosing)
        where = self._put(row_indices), self._put(tokens)
        kept = logits[where]
        logits[self._put(choosing)] = -torch.inf
        logits[where] = kept

    def _mask_bad_words_(
        self, logits: Tensor, rows: Ints, at: RowIndices, history: History
    ) -> None:
        patterns = [self._patterns[row] for row in rows[at]]
        width = max(pattern.shape[1] for pattern in patterns)
        owners = np.repeat(at, [len(pattern) for pattern in patterns])
        if not len(owners):
            return
        words = np.concatenate([_left_padded(pattern, width) for pattern in patterns])
        before = _last_tokens(history, rows[owners], width - 1)
        prefixes = words[:, :-1]
        found = ((prefixes == before) | (prefixes == WILDCARD)).all(-1)
        self._mask_(logits, owners[found], words[found, -1])

    def _mask_(self, logits: Tensor, row_indices: RowIndices, tokens: Tokens) -> None:
        logits[self._put(row_indices), self._put(tokens)] = -torch.inf

    def _put(self, array: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _right_aligned(words: Sequence[Sequence[int]]) -> Tokens:
    width = max(map(len, words), default=1)
    rows = [[WILDCARD] * (width - len(word)) + list(word) for word in words]
    return np.array(rows, np.int64).reshape(-1, width)


def _left_padded(pattern: Tokens, width: int) -> Tokens:
    missing = width - pattern.shape[1]
    return np.pad(pattern, ((0, 0), (missing, 0)), constant_values=WILDCARD) if missing else pattern


def _last_tokens(history: History, rows: Ints, count: int) -> Tokens:
    """Return the last `count` tokens of the given rows, [R, count]; see BEFORE_START."""
    positions = history.num_tokens[rows, None] + np.arange(-count, 0)
    tokens = history.tokens[rows[:, None], np.maximum(positions, 0)]
    return np.where(positions >= 0, tokens, BEFORE_START).astype(np.int64)


def _row_token_pairs(lists: Sequence[Tokens], at: RowIndices) -> tuple[RowIndices, Tokens]:
    """Flatten lists of tokens, one list per index in `at`, into pairs of index and token."""
    return np.repeat(at, [len(tokens) for tokens in lists]), np.concatenate(lists)
