"""Loads for the comparison of placement strategies, and the savings of an infinite cache."""

import random
from collections.abc import Sequence

from penstock.loadtests.bench.workload import TRACE_BLOCK, TraceRow
from penstock.loadtests.simulator.routing.run import Prompt

LONG_TOKENS, SHORT_TOKENS = 30_000, 500
LONG_FRACTION = 0.02
NUM_MIXED = 8_000
"""Number of prompts of `long_and_short`."""


def prompts_of(rows: Sequence[TraceRow]) -> list[Prompt]:
    """Return the prompts of a trace with hash ids. Only full blocks can be shared."""
    return [
        Prompt(row.at, row.input_len, row.blocks[: row.input_len // TRACE_BLOCK]) for row in rows
    ]


def without_sharing(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts with the same arrivals and lengths, but without common blocks."""
    first, unshared = 0, []
    for prompt in prompts:
        unshared.append(
            Prompt(prompt.at, prompt.num_tokens, range(first, first + len(prompt.blocks)))
        )
        first += len(prompt.blocks)
    return unshared


def long_and_short(seed: int) -> list[Prompt]:
    """Return a load of short prompts and a few long ones, in random order.

    On average, 20 prompts arrive per second.
    """
    rng, at, prompts = random.Random(seed), 0.0, []
    for _ in range(NUM_MIXED):
        at += rng.expovariate(20.0)
        length = LONG_TOKENS if rng.random() < LONG_FRACTION else SHORT_TOKENS
        prompts.append(Prompt(at, length, range(length // TRACE_BLOCK)))
    return without_sharing(prompts)


def infinite_cache_tokens(prompts: Sequence[Prompt]) -> int:
    """Return the number of cached tokens with one cache that never evicts a block."""
    seen: set[int] = set()
    total = 0
    for prompt in prompts:
        new = [depth for depth, block in enumerate(prompt.blocks) if block not in seen]
        depth = new[0] if new else len(prompt.blocks)
        total += min(depth * TRACE_BLOCK, prompt.num_tokens - 1)
        seen.update(prompt.blocks)
    return total
