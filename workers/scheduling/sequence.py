"""The scheduler's inputs and outputs: sequences, step plans, step outputs and events.

A sequence is one choice of one request: the prompt and the answer so far, as one list of tokens. A
`position` is an offset in this list, an `index` an offset in the answer.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.common.sampling_params import SamplingParams

Key: TypeAlias = Hashable
"""Identifies a sequence for the caller; the scheduler only compares keys."""

Ints: TypeAlias = npt.NDArray[np.int32]
Bools: TypeAlias = npt.NDArray[np.bool_]


NEVER = int(np.iinfo(np.int32).max)
"""A position beyond the end of any sequence."""


class FinishReason(IntEnum):
    """Reason why a choice ended; the values equal those of the worker protocol."""

    NONE = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another choice of a request, with the same prompt and parameters but its own answer."""

    choice: int
    tokens: Sequence[int]  # the prompt, then this choice's answer so far


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence to schedule; its KV can always be computed from its tokens alone.

    With `siblings`, this record represents several choices, whose common prompt is computed once.
    The beams of a beam search are siblings too. They get table rows, sample tokens and are removed
    all at the same time.
    """

    key: Key
    tokens: Sequence[int]  # the prompt, then the answer so far
    num_prompt: int
    params: SamplingParams
    choice: int = 0
    yield_after: int = 0  # number of new tokens after which the sequence yields; 0: never
    salt: bytes = b""  # sequences share cached blocks only under the same salt
    source_len: int = 0  # number of KV positions that another worker can send; 0: none
    siblings: tuple[Sibling, ...] = ()
    prompt_known: int = 1  # first prompt position that needs logprobs; position 0 never has any
    is_cacheable: bool = True  # False: the sequence's blocks do not enter the prefix cache
    grammar: Any = None  # compiled `params.structured_outputs`, for the sampler only


def usable_source(offered: int, num_prompt: int, lengths: Sequence[int]) -> int:
    """Return `offered` if all choices can use `offered` KV positions, otherwise 0.

    Args:
        offered: number of KV positions that the source worker can send.
        num_prompt: number of prompt tokens; several choices share only the prompt.
        lengths: number of tokens of each choice, prompt included. A choice must compute at least
            its last token.
    """
    usable = min(lengths) - 1
    if len(lengths) > 1:
        usable = min(usable, num_prompt)
    return offered if offered <= usable else 0


NO_TOKENS: Ints = np.zeros(0, np.int32)
NO_PAIRS: Ints = np.zeros((0, 2), np.int32)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one step: a ragged batch of B sequences with T tokens in total.

    Arrays [B] have the order of `rows`. Sequence b owns tokens `[query_starts[b],
    query_starts[b + 1])`. All `copies` are made at once, before the step writes any KV.
    """

    number: int  # step number, from 1
    rows: Ints  # [B] rows of the sequence table
    tokens: Ints  # [T] token ids
    positions: Ints  # [T] position of each token in its sequence
    query_starts: Ints  # [B + 1] index of each sequence's first token; the last entry is T
    context_lens: Ints  # [B] KV positions of each sequence, including those that this step writes
    block_tables: Ints  # [B, M] blocks of each sequence; unused entries are undefined
    slots: Ints  # [T] KV slot of each token: block * block_size + offset
    samples: Bools  # [B] whether the step samples a token for the sequence
    # [C, 2] blocks to copy before the step: source and destination of each copy
    copies: Ints = field(default_factory=lambda: NO_PAIRS)
    # [F, 2] for each fork, the index of its leader in `rows[samples]` and its own table row
    forks: Ints = field(default_factory=lambda: NO_PAIRS)
    # [P] indices of tokens after which the logprob of the next prompt token is requested
    scored: Ints = field(default_factory=lambda: NO_TOKENS)
    ahead: bool = False  # `tokens` are not known yet: call `fill` before the step runs

    def fill(self, drawn: Ints) -> None:
        """Set the tokens of a plan made ahead to those that the previous step sampled, in order."""
        self.tokens[:] = drawn

    def describe(self) -> dict[str, int | list[int]]:
        """Return the plan's shape for debugging, without tokens."""
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
    def num_sampling(self) -> int:
        """Length of `sampling_rows`."""
        return int(np.count_nonzero(self.samples)) + len(self.forks)

    @property
    def sampling_rows(self) -> Ints:
        """[S] table rows that get a new token.

        First come the rows with logits of their own (`samples`), then the forks, which sample from
        the logits of their leaders.
        """
        rows = self.rows[self.samples]
        return np.concatenate((rows, self.forks[:, 1])) if len(self.forks) else rows


@dataclass(frozen=True, slots=True)
class BeamRows:
    """The R beams among the sampling rows of a step, and the row that each of them continues."""

    rows: Ints  # [R] rows of the sequence table
    parents: Ints  # [R] row that each beam continues; the beam's own row if its search has ended


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The S new tokens of a committed step.

    First come the sampled tokens, in the order of the plan's sampling rows, then forced tokens. A
    sequence may thus have several tokens; they are in the order of the answer.
    """

    keys: list[Key]
    choices: Ints  # [S] choice numbers
    rows: Ints  # [S] rows of the sequence table
    indices: Ints  # [S] index of each token in its answer
    tokens: Ints  # [S] token ids
    finishes: Ints  # [S] values of `FinishReason`


@dataclass(frozen=True, slots=True)
class Admitted:
    """Event: a choice got a table row. Other objects must now set up their state for it."""

    key: Key
    row: int
    choice: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache; the same for all choices


@dataclass(frozen=True, slots=True)
class Yielded:
    """Event: the sequence has stopped; blocks of positions [0, kv_len) are kept under a lease."""

    key: Key
    kv_len: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Event: blocks are reserved for a KV transfer of positions [have, stop)."""

    key: Key
    have: int  # positions below `have` are in cached blocks
    stop: int
    blocks: Ints = field(compare=False)  # [n] blocks that the transfer writes


@dataclass(frozen=True, slots=True)
class Preempted:
    """Event: a choice of the sequence, with its forks or beams, went back into the queue."""

    key: Key


@dataclass(frozen=True, slots=True)
class Finished:
    """Event: every choice of the sequence has ended."""

    key: Key


SchedulerEvent: TypeAlias = Admitted | Yielded | Reserved | Preempted | Finished


class NeverFits(ValueError):
    """The sequence could not run on this worker even alone; the message names the limit."""


class QueueFull(ValueError):
    """The waiting queue is full; the sequence was not accepted."""


class LeaseGone(KeyError):
    """The lease was dropped or reclaimed."""
