"""Generates arrivals over time: from traces, in steps, or in waves."""

import math
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from penstock.loadtests.bench.traces import read_trace
from penstock.loadtests.bench.workload import (
    TRACE_BLOCK,
    Lengths,
    Planned,
    capped,
    traced_load,
)


def from_trace(
    path: Path, seconds: float, speed: float, max_input: int, max_output: int
) -> list[Planned]:
    """Replay a trace `speed` times as fast, and return the requests of the first `seconds`."""
    rows = [capped(row, max_input, max_output) for row in read_trace(path)]
    rows = [row for row in rows if row.at / speed <= seconds]
    return traced_load(rows, [row.at / speed for row in rows])


def replicated(
    plan: Sequence[Planned], copies: float, seed: int, own_blocks: bool = False
) -> list[Planned]:
    """Return `copies` times as many requests. Copies of a request are delayed by up to 5 s.

    The copies model more users. Replaying the trace faster would shorten its bursts.

    Args:
        plan: the requests to copy.
        copies: number of copies. The fractional part is the probability of one more copy.
        seed: the same seed gives the same delays.
        own_blocks: whether each copy of the plan has blocks of its own, shared only within the
            copy. If False, all copies of a prompt are equal.
    """
    random = np.random.Generator(np.random.Philox(key=[seed, 1]))
    stride = own_blocks * (1 + max((block for one in plan for block in one.blocks), default=0))
    drawn: list[tuple[float, int, Planned]] = []
    for one in plan:
        count = int(copies) + (random.random() < copies - int(copies))
        delays = random.uniform(0.0, 5.0, count)
        drawn.extend((one.due + later, copy, one) for copy, later in enumerate(delays))
    drawn.sort(key=lambda row: row[0])
    return [
        Planned(
            number,
            float(due),
            one.input_len,
            one.output_len,
            tuple(block + copy * stride for block in one.blocks),
        )
        for number, (due, copy, one) in enumerate(drawn)
    ]


def steps(low: float, high: float, every: float) -> Callable[[float], float]:
    """Return a function (time -> requests per second) that alternates between two rates.

    The rate is `low` for `every` seconds, then `high` for `every` seconds, and so on.
    """
    return lambda at: high if int(at / every) % 2 else low


def sinusoid(low: float, high: float, period: float) -> Callable[[float], float]:
    """Return a sinusoidal rate function (time -> requests per second) that starts at `low`."""
    middle, half = (low + high) / 2, (high - low) / 2
    return lambda at: middle - half * math.cos(2 * math.pi * at / period)


def varying(
    rate: Callable[[float], float],
    most: float,
    seconds: float,
    inputs: Lengths,
    outputs: Lengths,
    seed: int,
) -> list[Planned]:
    """Generate a Poisson process with the varying rate `rate(time) <= most`, by thinning."""
    random = np.random.Generator(np.random.Philox(key=[seed, 2]))
    due, times = 0.0, []
    while (due := due + float(random.exponential(1 / most))) <= seconds:
        if random.random() * most <= rate(due):
            times.append(due)
    lengths = zip(inputs.draw(len(times), random), outputs.draw(len(times), random), strict=True)
    return [
        Planned(number, at, int(input_len), int(output_len))
        for number, (at, (input_len, output_len)) in enumerate(zip(times, lengths, strict=True))
    ]


def prompt_of(planned: Planned) -> "array[int]":
    """Return the tokens of a prompt. Prompts with equal first blocks have equal first tokens.

    The result is an array, because traces have many tokens. Batchers and hashes then read them
    without a loop.
    """
    if not planned.blocks:
        return array("i", (planned.number,)) * planned.input_len
    ids = (np.array(planned.blocks, np.int64) % (2**31 - 1)).astype(np.int32)
    return array("i", ids.repeat(TRACE_BLOCK)[: planned.input_len].tobytes())
