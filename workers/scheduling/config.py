"""Limits of the scheduler, and a check whether a sequence can run within these limits."""

import math
from dataclasses import dataclass, field

from penstock.workers.scheduling.sequence import NeverFits, NewSequence


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler. Raises ValueError if a value is invalid."""

    num_blocks: int
    max_model_len: int  # maximum number of prompt and answer tokens of a sequence
    block_size: int = 16  # tokens per block
    max_sequences: int = 64  # maximum number of sequences with a table row
    max_batched_tokens: int = 512  # token budget of a step
    # A step with this many prompt tokens begins no further prompt; 0 means no limit. It still
    # continues prompts that earlier steps have begun.
    enough_prompt_tokens: int = 0
    max_queued: int = 1024  # maximum number of waiting sequences
    lease_fraction: float = 0.5  # largest fraction of the blocks under leases
    # Limit of the time between two tokens of an answer; 0 means no limit. See `step_budget`.
    tpot_slo_seconds: float = 0.0
    num_stages: int = 1  # pipeline stages; also the maximum number of steps in flight
    # Admission leaves this many blocks free for each sequence that is already in the batch.
    watermark: int = 1
    # Forced tokens make the next step slower for all rows, because a step with forced tokens cannot
    # run as a graph. Forced tokens are added only if there are at least this many of them per
    # running row that gets none.
    forced_per_other_row: float = 4.0
    static: bool = False  # static batching, as a baseline: admit only when the batch is empty
    hash_key: bytes = field(default=b"", repr=False)  # secret of the cluster: see `root_hash`

    def __post_init__(self) -> None:
        for name in (
            *("num_blocks", "block_size", "max_sequences", "max_batched_tokens", "num_stages"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_sequences "
                f"({self.max_sequences}): every sequence may need a token in a step"
            )
        if self.forced_per_other_row < 0:
            raise ValueError(
                f"forced_per_other_row must be at least 0, not {self.forced_per_other_row}"
            )
        if not 0 <= self.tpot_slo_seconds < math.inf:
            raise ValueError(
                f"tpot_slo_seconds must be at least 0 and finite, not {self.tpot_slo_seconds}"
            )
        for name in ("max_queued", "watermark", "enough_prompt_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        if not 0 <= self.lease_fraction <= 1:
            raise ValueError(f"lease_fraction must be from 0 to 1, not {self.lease_fraction}")


def check_fits(new: NewSequence, limits: SchedulerConfig) -> None:
    """Raise NeverFits if the sequence could not run to its end even if it ran alone."""
    num_choices = 1 + len(new.siblings)
    if num_choices > limits.max_sequences:
        raise NeverFits(
            f"the request has {num_choices} choices, but this worker runs at most "
            f"{limits.max_sequences} sequences at a time: request fewer choices"
        )
    if new.params.use_beam_search:
        _check_beams(new, num_choices, limits)
    for tokens in (new.tokens, *(sibling.tokens for sibling in new.siblings)):
        _check_lengths(new, len(tokens), limits)


def _check_beams(new: NewSequence, width: int, limits: SchedulerConfig) -> None:
    """Raise NeverFits if the KV cache could not hold all beams at their full length.

    All beams share the prompt's full blocks, and no other blocks.
    """
    size = limits.block_size
    longest = new.num_prompt + new.params.answer_limit(new.num_prompt, limits.max_model_len) - 1
    shared = new.num_prompt // size
    needed = shared + width * (-(-longest // size) - shared)
    if needed > limits.num_blocks:
        raise NeverFits(
            f"{width} beams of {longest} tokens may need {needed} KV blocks of {size} tokens, but "
            f"this worker has {limits.num_blocks}: request fewer beams or a lower max_tokens"
        )


def _check_lengths(new: NewSequence, num_tokens: int, limits: SchedulerConfig) -> None:
    params = new.params
    if not 1 <= new.num_prompt <= num_tokens:
        raise NeverFits(
            f"the number of prompt tokens (num_prompt) must be from 1 to {num_tokens}, the number "
            f"of all tokens of the sequence, not {new.num_prompt}"
        )
    if num_tokens >= limits.max_model_len:
        raise NeverFits(
            f"the sequence has {num_tokens} tokens, which leaves no room for an answer: prompt "
            f"and answer together may have at most {limits.max_model_len} tokens"
        )
    if params.max_tokens is not None and num_tokens - new.num_prompt >= params.max_tokens:
        raise NeverFits(
            f"the answer so far has {num_tokens - new.num_prompt} tokens: expected fewer than "
            f"max_tokens ({params.max_tokens})"
        )
    if not 0 <= new.source_len < num_tokens:
        raise NeverFits(
            f"the source of the KV transfer offers {new.source_len} positions: expected 0 to "
            f"{num_tokens - 1}, less than the sequence's number of tokens"
        )
    # The last token ends the sequence: its K and V are never computed.
    longest = new.num_prompt + params.answer_limit(new.num_prompt, limits.max_model_len) - 1
    if longest > limits.num_blocks * limits.block_size:
        raise NeverFits(
            f"prompt and answer may need {longest} tokens of KV cache, but this worker's cache "
            f"has room for {limits.num_blocks * limits.block_size}: request a lower max_tokens"
        )
