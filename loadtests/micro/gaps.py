"""Measures the idle time between two steps of the engine.

`python -m penstock.loadtests.micro.gaps` measures the time from sampling in one step to the start
of the model in the next step, while a fixed number of sequences decodes. Two modes alternate: steps
one by one, and overlap stepping as in a worker. Overlap stepping plans each step while the previous
step is in flight.
"""

import dataclasses
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.workload import Planned, Prompts, ordinary_tokens
from penstock.loadtests.micro.ab_runner import Quantiles, Setup, run
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.results import StepResult
from penstock.workers.engine.stepper import OverlapStepper
from penstock.workers.scheduling.sequence import NewSequence

_NUM_WARMUPS = 4  # number of first steps of a run that do not count


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Sequences of a run, and the number of runs."""

    concurrency: int = option(16, "number of sequences")
    input_len: int = option(64, "prompt tokens of each sequence")
    output_len: int = option(128, "answer tokens of each sequence")
    rounds: int = option(5, "runs of each mode")


class StepGaps:
    """Runs an engine until all sequences have finished, and records gaps and step times."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._began = time.perf_counter()
        self.gaps: list[float] = []  # idle seconds before each step
        self.steps: list[float] = []  # seconds from the end of the previous step to each step's end

    def note(self, result: StepResult) -> None:
        now = time.perf_counter()
        if result.output is not None:
            self.gaps.append(self._engine.executor.gap_seconds)
            self.steps.append(now - self._began)
        self._began = now

    def one_by_one(self) -> None:
        while (result := self._engine.step()).output is not None:
            self.note(result)

    def pipelined(self) -> None:
        changed = threading.Condition()
        engine = self._engine
        pipeline = OverlapStepper(engine.batcher, engine.executor, engine.outputs, changed)
        pipeline.advance(commanded=True)
        while pipeline.busy:
            pipeline.plan_next()
            with changed:
                changed.wait_for(lambda: pipeline.due)
            self.note(pipeline.advance(commanded=False))
        pipeline.stop()


def run_round(
    engine: Engine, prompts: Prompts, load: Load, round_index: int, kind: str
) -> StepGaps:
    """Run `load.concurrency` new prompts to completion, with the stepping mode `kind`."""
    params = SamplingParams(temperature=0.0, max_tokens=load.output_len)
    for i in range(load.concurrency):
        number = round_index * load.concurrency + i
        tokens = prompts.tokens(Planned(number, 0.0, load.input_len, load.output_len))
        engine.submit(NewSequence(number, tokens, len(tokens), params))
    steps = StepGaps(engine)
    steps.one_by_one() if kind == "one_by_one" else steps.pipelined()
    return steps


def figures(rounds: Sequence[StepGaps]) -> dict[str, Any]:
    """Summarize runs by percentiles of the gaps, and quantiles of idle fraction and step time."""
    gaps = np.concatenate([each.gaps[_NUM_WARMUPS:] for each in rounds])
    fractions = [sum(each.gaps[_NUM_WARMUPS:]) / sum(each.steps[_NUM_WARMUPS:]) for each in rounds]
    means = [float(np.mean(each.steps[_NUM_WARMUPS:])) * 1000 for each in rounds]
    return {
        "gap_p50_us": float(np.percentile(gaps, 50)) * 1e6,
        "gap_p99_us": float(np.percentile(gaps, 99)) * 1e6,
        "fraction": dataclasses.asdict(Quantiles.of(fractions)),
        "step_ms": dataclasses.asdict(Quantiles.of(means)),
    }


async def _measure(setup: Setup, load: Load) -> dict[str, Any]:
    engine = Engine(WorkerConfig(name="gaps", model=setup.model_folder, threads=setup.threads))
    engine.warm_up()
    prompts = Prompts(ordinary_tokens(engine.spec.vocab_size), 0)
    rounds: dict[str, list[StepGaps]] = {"one_by_one": [], "pipelined": []}
    for round_number in range(load.rounds * 2):
        kind = list(rounds)[round_number % 2]
        rounds[kind].append(run_round(engine, prompts, load, round_number, kind))
    found = {kind: figures(taken) for kind, taken in rounds.items()}
    for kind, each in found.items():
        print(
            f"{kind.replace('_', ' ')}: gap p50 {each['gap_p50_us']:.0f} µs, "
            f"p99 {each['gap_p99_us']:.0f} µs, {each['fraction']['median']:.1%} of the time; "
            f"a step takes {each['step_ms']['median']:.2f} ms"
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program = "python -m penstock.loadtests.micro.gaps"
    setup, load = read_flags(program, "Time between two steps.", (Setup, Load), arguments)
    config = {**dataclasses.asdict(setup), **dataclasses.asdict(load)}
    return run(lambda: _measure(setup, load), config, setup.save_json)


if __name__ == "__main__":
    sys.exit(main())
