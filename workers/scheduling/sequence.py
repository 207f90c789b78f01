"""What the scheduler is told of a sequence, and the records that cross its boundary.

A sequence is one choice of one request: its prompt and the answer so far, as one list of tokens.
Positions in *that* list are called positions; positions in the answer are called indices.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.common.sampling_params import SamplingParams

Key: TypeAlias = Hashable
"""Names a sequence for its owner: the scheduler only compares it."""

Ints: TypeAlias = npt.NDArray[np.int32]
Bools: TypeAlias = npt.NDArray[np.bool_]


NEVER = int(np.iinfo(np.int32).max)
"""A position that no sequence reaches."""


class FinishReason(IntEnum):
    """Why a choice ended; the numbers are those of the wire."""

    NONE = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another choice of the same request: the same prompt and parameters, its own answer."""

    choice: int
    tokens: Sequence[int]  # the prompt, then this choice's answer so far


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence handed to the scheduler: complete, it can always be run from its tokens.

    With siblings it is several: the prompt is computed once, for all of them. The beams of a search
    are siblings that stay together: they have rows, draw and leave at the same time.
    """

    key: Key
    tokens: Sequence[int]  # the prompt, then the answer so far
    num_prompt: int
    params: SamplingParams
    choice: int = 0
    yield_after: int = 0  # yield after so many new tokens; 0: never
    priority: int = 0  # higher first
    salt: bytes = b""  # sequences share cached blocks only under the same salt
    source_len: int = 0  # KV positions that can be had from elsewhere; 0: none
    siblings: tuple[Sibling, ...] = ()
    prompt_known: int = 1  # prompt positions below it need no logprobs; the first has none


def usable_source(offered: int, num_prompt: int, lengths: Sequence[int]) -> int:
    """How many of the KV positions that are offered choices of these lengths take: all, or none.

    lengths: prompts included. Each needs a token to compute, and all they share is their prompt.
    """
    usable = min(lengths) - 1
    if len(lengths) > 1:
        usable = min(usable, num_prompt)
    return offered if offered <= usable else 0


NO_TOKENS: Ints = np.zeros(0, np.int32)
NO_PAIRS: Ints = np.zeros((0, 2), np.int32)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One ragged batch: B sequences, T tokens, in the same order in every array.

    Sequence b owns tokens `[query_starts[b], query_starts[b + 1])`. All `copies` are made at once,
    before anything is written.
    """

    number: int  # of the step, from 1
    rows: Ints  # [B] rows of the sequence table
    tokens: Ints  # [T]
    positions: Ints  # [T]
    query_starts: Ints  # [B + 1]
    context_lens: Ints  # [B] KV positions readable once this step has written its own
    block_tables: Ints  # [B, M] blocks of each sequence; entries past its blocks are meaningless
    slots: Ints  # [T] where each token's K and V go: block * block_size + offset
    samples: Bools  # [B] whether the sequence's last token here draws a new one
    copies: Ints = field(default_factory=NO_PAIRS.copy)  # [C, 2] blocks: from, to
    # [F, 2] a place among the samples, and the row that draws from its logits too
    forks: Ints = field(default_factory=NO_PAIRS.copy)
    # [P] prompt tokens (places in `tokens`) whose successors' logprobs are wanted
    scored: Ints = field(default_factory=NO_TOKENS.copy)
    ahead: bool = False  # `tokens` are not drawn yet: `fill` it before it runs

    def fill(self, drawn: Ints) -> None:
        """Set the tokens of a plan made ahead: what the step before it drew, in order."""
        self.tokens[:] = drawn

    def describe(self) -> dict[str, int | list[int]]:
        """Its shape, without what is in it."""
        return {
            "number": self.number,
            "rows": self.rows.tolist(),
            "new_tokens": np.diff(self.query_starts).tolist(),
            "context_lens": self.context_lens.tolist(),
            "num_copies": len(self.copies),
            "num_forks": len(self.forks),
            "num_scored": len(self.scored),
            "ahead": int(self.ahead),
        }

    @property
    def sampling_rows(self) -> Ints:
        """[S] the rows that draw a token: those that sample, then those of the forks."""
        rows = self.rows[self.samples]
        return np.concatenate((rows, self.forks[:, 1])) if len(self.forks) else rows


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a committed step gave: one entry a new token, in the order of the drawing rows."""

    keys: list[Key]
    choices: Ints  # [S]
    rows: Ints  # [S] rows of the sequence table
    indices: Ints  # [S] in the answer
    tokens: Ints  # [S]
    finishes: Ints  # [S] values of `Finish`


@dataclass(frozen=True, slots=True)
class Admitted:
    """The sequence has its row: whoever keeps state a row (the sampler) sets it up now."""

    key: Key
    row: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Yielded:
    """Nothing more will come of it; blocks of positions [0, kv_len) are kept under a lease."""

    key: Key
    kv_len: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks for what its source offers are reserved; below `have` they hold it already."""

    key: Key
    have: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Every choice of it has ended by itself and let go of everything."""

    key: Key


SchedulerEvent: TypeAlias = Admitted | Yielded | Reserved | Finished


class NeverFits(ValueError):
    """The sequence could not run here even alone; the message says which limit it breaks."""


class QueueFull(ValueError):
    """No more sequences are taken for now."""


class LeaseGone(KeyError):
    """The lease was dropped or taken back."""
