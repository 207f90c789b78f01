"""Plans the loads that every arrangement gets. All of them are derived from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.loadtests.bench.metrics import Goals
from penstock.loadtests.bench.workload import Lengths, Planned, TraceRow, drawn_load, traced_load

ANSWER_WEIGHT = 2.0
"""Cost of an answer token relative to a prompt token; gives all phases of the mix equal work."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load: its requests, and how they are sent."""

    name: str
    plan: Sequence[Planned]
    # Number of streams of a closed loop, or None to send requests at their times.
    concurrency: int | None = None
    goals: Goals | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the changing mix: the lengths of its prompts and answers."""

    inputs: Lengths
    outputs: Lengths

    @property
    def mean_cost(self) -> float:
        """Mean cost of a request, in prompt tokens."""
        prompt, answer = ((each.low + each.high) / 2 for each in (self.inputs, self.outputs))
        return prompt + ANSWER_WEIGHT * answer


PHASES = (
    Phase(Lengths(32, 96), Lengths(96, 192)),  # short questions with long answers
    Phase(Lengths(384, 896), Lengths(8, 24)),  # long prompts with short answers
    Phase(Lengths(96, 160), Lengths(48, 80)),  # prompts and answers of medium length
    Phase(Lengths(16, 48), Lengths(8, 24)),  # many short requests with short answers
)
"""Phases of the changing mix. After the last phase, the first one follows again."""


def closed_loop(streams: int, count: int, input_len: int, output_len: int) -> LoadPlan:
    """Return a load of `count` requests of equal lengths, of which `streams` run at any time."""
    plan = [Planned(number, 0.0, input_len, output_len) for number in range(count)]
    return LoadPlan(f"{streams} streams" if streams > 1 else "1 stream", plan, streams)


def changing_mix(
    seconds: float, phase_seconds: float, work: float, goals: Goals, seed: int
) -> LoadPlan:
    """Return a load whose lengths change every `phase_seconds`, with Poisson arrivals.

    Args:
        seconds: duration of the load.
        phase_seconds: duration of a phase.
        work: offered work per second, which is the same in every phase: prompt tokens plus
            `ANSWER_WEIGHT` times the answer tokens.
        goals: latency limits of goodput.
        seed: seed of lengths and times.
    """
    plan: list[Planned] = []
    for number in range(int(np.ceil(seconds / phase_seconds))):
        phase, began = PHASES[number % len(PHASES)], number * phase_seconds
        rate = work / phase.mean_cost
        count = max(1, int(rate * min(phase_seconds, seconds - began)))
        drawn = drawn_load(count, rate, phase.inputs, phase.outputs, seed + number)
        sent = len(plan)
        plan += (replace(one, number=sent + one.number, due=began + one.due) for one in drawn)
    return LoadPlan("changing mix", plan, goals=goals)


@dataclass(frozen=True, slots=True)
class Thinning:
    """Parameters that thin a trace so that a small machine can serve it."""

    seconds: float  # seconds of the trace that are replayed, beginning at its start
    keep: float  # probability of keeping a request of the trace
    divide: int  # number by which all lengths are divided
    max_model_len: int  # maximum tokens of a request; longer prompts are truncated
    seed: int = 0


def thinned_trace(rows: Sequence[TraceRow], thinning: Thinning, goals: Goals) -> LoadPlan:
    """Return a load that plays a thinned trace in real time.

    Raises:
        ValueError: no request of the trace is left.
    """
    early = [row for row in rows if row.at < thinning.seconds]
    random = np.random.default_rng(thinning.seed)
    drawn = random.random(len(early))
    kept = [row for row, one in zip(early, drawn, strict=True) if one < thinning.keep]
    if not kept:
        raise ValueError(
            f"none of the {len(early)} requests in the first {thinning.seconds:g} s of the trace "
            "was kept: raise --trace-keep or --trace-seconds"
        )
    short = [_shortened(row, thinning) for row in kept]
    return LoadPlan("trace", traced_load(short, [row.at for row in kept]), goals=goals)


def _shortened(row: TraceRow, thinning: Thinning) -> TraceRow:
    answer = min(-(-row.output_len // thinning.divide), thinning.max_model_len - 1)
    prompt = min(-(-row.input_len // thinning.divide), thinning.max_model_len - answer)
    return TraceRow(row.at, prompt, answer)
