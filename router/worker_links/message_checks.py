"""Checks of the values of workers' messages that would break a router's calculations.

A router divides by sizes, adds up durations and sorts by both. A worker that reports impossible
values is therefore refused, and its stream is closed.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf

from penstock.protos import worker_pb2 as pb

MAX_SIZE = (1 << 31) - 1
"""Largest size in a Welcome message; workers number blocks and tokens with 32-bit integers."""
MAX_TEXT = 4096
"""Largest number of characters of a text in a Welcome message."""
MAX_ENTRIES = 4096
"""Largest number of entries of a list in a Welcome or Load message."""
ROLES = frozenset(("prefill", "decode", "mixed"))

SIZES = ("block_size", "num_blocks", "max_model_len", "max_sequences", "vocab_size")
TEXTS = ("incarnation", "model", "layout", "machine")


def check_welcome(welcome: pb.Welcome) -> None:
    """Raise ValueError if a Welcome message has values that no worker can have."""
    for name in SIZES:
        size = getattr(welcome, name)
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"the worker reports {name} = {size}: must be from 1 to {MAX_SIZE}")
    for name in ("max_batched_tokens", "enough_prompt_tokens"):
        if getattr(welcome, name) > MAX_SIZE:
            raise ValueError(f"the worker reports {name} > {MAX_SIZE}")
    if welcome.role not in ROLES:
        raise ValueError(f"the worker reports the unknown role {welcome.role[:40]!r}")
    at = welcome.transfer
    texts = [getattr(welcome, name) for name in TEXTS]
    if max(map(len, (*texts, at.worker, at.incarnation, at.address, at.secret))) > MAX_TEXT:
        raise ValueError(f"the worker reports a text of more than {MAX_TEXT} characters")
    if len(welcome.eos_tokens) > MAX_ENTRIES:
        raise ValueError(f"the worker reports more than {MAX_ENTRIES} end tokens")
    _check_bounds("step_bounds", welcome.step_bounds)
    _check_bounds("step_token_bounds", welcome.step_token_bounds)
    check_load(welcome.load)


def check_load(load: pb.Load) -> None:
    """Raise ValueError if a Load message has durations or lists that no worker can have."""
    # `<` is False for NaN. This runs for every step of every worker, so it has no loop.
    if not (
        0 <= load.step_seconds < inf
        and 0 <= load.prompt_seconds < inf
        and 0 <= load.expert_imbalance < inf
    ):
        raise ValueError("the worker reports a load with a negative or infinite number, or a NaN")
    if len(load.step_counts) > MAX_ENTRIES or len(load.step_token_counts) > MAX_ENTRIES:
        raise ValueError(f"the worker reports a histogram of more than {MAX_ENTRIES} buckets")


def check_logprobs(entries: Iterable[pb.TokenLogprobs]) -> None:
    """Raise ValueError if the tokens and the logprobs of an entry differ in number."""
    if any(len(entry.tokens) != len(entry.values) for entry in entries):
        raise ValueError("a step has entries with different numbers of tokens and logprobs")


def _check_bounds(name: str, bounds: Sequence[float]) -> None:
    if len(bounds) >= MAX_ENTRIES:
        raise ValueError(f"the worker reports {len(bounds)} {name}: too many")
    if not all(0 <= bound < inf for bound in bounds):
        raise ValueError(f"the worker reports {name} that are negative, infinite or NaN")
    if any(low >= high for low, high in pairwise(bounds)):
        raise ValueError(f"the worker reports {name} that are not in ascending order")
