"""Performance regression check: measures a few ratios and compares them with recorded values.

`python -m penstock.loadtests.micro.regression_check` prints the change of each ratio, and exits
with 1 if one got worse. With `--record`, the current values are recorded instead. The two sides of
a ratio are measured alternately in one run, so that other load affects both.

With `--against DIR`, the check compares the current tree with another checkout instead (see
`tree_comparison`).
"""

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

import penstock
from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.report import commit, machine
from penstock.loadtests.bench.workload import Planned, Prompts, ordinary_tokens
from penstock.loadtests.comparison.checkpoints import Cost
from penstock.loadtests.micro import throughput
from penstock.loadtests.micro.ab_runner import (
    SHIPPED_MODEL,
    MeasurementFailed,
    Quantiles,
    Setup,
    run,
    steady_rate,
)
from penstock.loadtests.micro.engine_client import EngineClient
from penstock.loadtests.micro.server import ServerFailed
from penstock.loadtests.micro.source_tree import SourceTree
from penstock.loadtests.micro.tree_comparison import Comparison, compare_trees
from penstock.loadtests.micro.tree_figures import Amounts, measure_tree
from penstock.workers.scheduling.batcher import Batcher, SchedulerConfig
from penstock.workers.scheduling.sequence import NewSequence

PROGRAM = "python -m penstock.loadtests.micro.regression_check"
RATIOS = {
    "decode": "decode of 16 sequences in the engine / matmul (FLOP/s)",
    "prefill": "prompt of 1,024 tokens in the engine / matmul (FLOP/s)",
    "scheduler": "fixed amount of numpy work / batcher step of 256 sequences (CPU time)",
    "path": "decode through `penstock serve` / engine alone (tokens/s)",
}
"""Descriptions of the ratios; for each ratio, higher is better."""

_RUNS_TO_RECORD = 3  # several runs, because values vary more between runs than within a run
_ROUNDS = 7
_SEQUENCES, _SCHEDULED, _PROMPT, _ANSWER, _LONG = 16, 256, 64, 48, 1024
_PRODUCT = 512, 1024  # shape of the matmul: [rows, width] x [width, width]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckOptions:
    """Settings of the check."""

    record: bool = option(False, "record the current values instead of comparing")
    file: str = option("loadtests/results/guard.json", "file of the recorded values")
    threads: int = option(1, "threads of the engine and of the matmul")
    against: str = option("", "compare with the source tree in this folder instead")
    rounds: int = option(5, "rounds of the comparison with --against, 2 or more")
    save_json: str = option("", "write the results of --against to this file")


@dataclasses.dataclass(frozen=True, slots=True)
class RatioChange:
    """One ratio, with its recorded values and the values measured now."""

    name: str
    before: Quantiles
    now: Quantiles

    @property
    def by(self) -> float:
        """Relative change of the median; negative if the ratio got worse."""
        return self.now.median / self.before.median - 1

    @property
    def worse(self) -> bool:
        """True if the ratio decreased, and each median is outside the other's 10-90% range."""
        return self.now.median < self.before.low and self.before.median > self.now.high

    def __str__(self) -> str:
        verdict = "WORSE" if self.worse else "ok"
        return (
            f"{verdict:<5} {self.name:<9} {self.by:+7.1%}  now {self.now}; was {self.before}\n"
            f"      {RATIOS[self.name]}"
        )


def compare(before: dict[str, list[float]], now: dict[str, list[float]]) -> list[RatioChange]:
    """Return the change of each ratio that is in both `before` and `now`."""
    return [
        RatioChange(name, Quantiles.of(before[name]), Quantiles.of(now[name]))
        for name in RATIOS
        if name in before and name in now
    ]


def measure(threads: int) -> dict[str, list[float]]:
    """Measure all ratios in one short run. Return one value per round for each ratio."""
    engine, cost = EngineClient(SHIPPED_MODEL, threads), Cost.of(SHIPPED_MODEL)
    prompts = Prompts(ordinary_tokens(engine.vocab_size), seed=0)
    steps = _scheduler_steps()
    ratios: dict[str, list[float]] = {"decode": [], "prefill": [], "scheduler": []}
    for round_number in range(_ROUNDS + 1):
        product = _product_flops()
        first = round_number * (_SEQUENCES + 1)
        tokens = [_prompt(prompts, first + n, _PROMPT) for n in range(_SEQUENCES)]
        decoded = steady_rate(engine.run(tokens, _ANSWER))
        # The FLOPs of attention are ignored: they grow by a few percent during an answer.
        decode = decoded * 2 * (cost.body + cost.head) / product
        long = engine.prefill(_prompt(prompts, first + _SEQUENCES, _LONG))
        prefill = cost.prefill(_LONG) / long / product
        scheduler = _numpy_seconds() / steps()
        if round_number:  # round 0 is a warm-up and does not count
            for name, value in zip(ratios, (decode, prefill, scheduler), strict=True):
                ratios[name].append(value)
    return {**ratios, "path": _path(threads)}


def _prompt(prompts: Prompts, number: int, length: int) -> list[int]:
    return prompts.tokens(Planned(number, 0.0, length, 1))


def _path(threads: int) -> list[float]:
    """Return decode throughput through `penstock serve` relative to the engine alone, per round."""
    requests = throughput.Requests(rounds=_ROUNDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        path, direct = runner.run(throughput.measure_rounds(Setup(threads=threads), requests))
    return throughput.ratios(path.decode_rates(), direct.decode_rates())


def _product_flops() -> float:
    rows, width = _PRODUCT
    left, right = torch.ones(rows, width), torch.ones(width, width)
    return 2 * rows * width * width / _least(lambda: torch.mm(left, right), 30, time.perf_counter)


def _numpy_seconds() -> float:
    table = np.arange(_SCHEDULED * 64, dtype=np.int32).reshape(_SCHEDULED, 64)
    rows = np.arange(_SCHEDULED)[::-1].copy()

    def unit() -> None:
        for _ in range(10):
            np.cumsum(table[rows, 0])
            table[rows].sum(1)

    return _least(unit, 50, time.thread_time)


def _scheduler_steps() -> Callable[[], float]:
    """Return a function that measures the CPU time of planning and committing a decode step."""
    length = 4096
    limits = SchedulerConfig(
        num_blocks=_SCHEDULED * (length // 16 + 1),
        max_model_len=length,
        block_size=16,
        max_sequences=_SCHEDULED,
        max_batched_tokens=2 * _SCHEDULED,
    )
    batcher = Batcher(limits)
    params = SamplingParams(temperature=0.0, max_tokens=length - 8)
    for key in range(_SCHEDULED):
        batcher.submit(NewSequence(key, [key + 3] * 8, 8, params))

    def step() -> None:
        plan = batcher.plan()
        assert plan is not None
        batcher.commit(plan, np.full(int(plan.samples.sum()), 5, np.int32))
        batcher.events()

    for _ in range(3 * 8):
        step()
    return lambda: _least(step, 100, time.thread_time)


def _least(work: Callable[[], Any], count: int, clock: Callable[[], float]) -> float:
    """Call `work` `count` times and return the 10th percentile of its durations in seconds.

    Disturbed calls are slower, so they do not change the 10th percentile.
    """
    taken = []
    for _ in range(count):
        began = clock()
        work()
        taken.append(clock() - began)
    return float(np.percentile(taken, 10))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then record or compare, and return the exit code.

    The exit code is 0 for success, 1 after an error or if a ratio got worse, 2 for invalid flags,
    and 130 after Ctrl-C.
    """
    about = "Measure a few performance ratios and report which got worse."
    (guard,) = read_flags(PROGRAM, about, (CheckOptions,), arguments)
    if guard.against:
        return _compare_with_tree(guard)
    try:
        return _record(guard) if guard.record else _compare(guard)
    except (MeasurementFailed, ServerFailed, OSError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _compare_with_tree(guard: CheckOptions) -> int:
    try:
        if guard.record:
            raise ValueError("--against cannot be used with --record: leave out one of them")
        if guard.rounds < 2:
            raise ValueError(f"--against needs --rounds of at least 2, not {guard.rounds}")
        other = SourceTree.at(Path(guard.against))
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    here = SourceTree.at(Path(penstock.__file__).parent.parent)
    amounts = Amounts(threads=guard.threads)
    comparisons: list[Comparison] = []

    async def measure() -> dict[str, Any]:
        comparisons.extend(
            await compare_trees(
                other,
                here,
                guard.rounds,
                lambda tree: measure_tree(tree, amounts),
                lambda line: print(line, file=sys.stderr, flush=True),
            )
        )
        for each in comparisons:
            print(each)
        return {"figures": {each.name: each.figures() for each in comparisons}}

    code = run(measure, dataclasses.asdict(guard), guard.save_json)
    return code or int(any(each.verdict == "worse" for each in comparisons))


def _record(guard: CheckOptions) -> int:
    runs = []
    for number in range(_RUNS_TO_RECORD):
        print(f"run {number + 1} of {_RUNS_TO_RECORD}", file=sys.stderr, flush=True)
        runs.append(measure(guard.threads))
    ratios = {name: [round(v, 4) for run in runs for v in run[name]] for name in RATIOS}
    kept = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "threads": guard.threads,
        "ratios": ratios,
    }
    Path(guard.file).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    for name, values in ratios.items():
        print(f"{name:<9} {Quantiles.of(values)}: {RATIOS[name]}")
    return 0


def _compare(guard: CheckOptions) -> int:
    kept = json.loads(Path(guard.file).read_text(encoding="utf-8"))
    here = {**machine(), "threads": guard.threads}
    for what in ("cpu", "cpus", "threads"):
        then = {**kept["machine"], "threads": kept["threads"]}[what]
        if then != here[what]:
            raise ValueError(
                f"{guard.file} was recorded with {what} {then}, but {what} is now {here[what]}: "
                "run with --record to record the figures again"
            )
    changes = compare(kept["ratios"], measure(guard.threads))
    print(f"recorded on {kept['date']} at {kept['commit'] or 'an unknown commit'}")
    for change in changes:
        print(change)
    return int(any(change.worse for change in changes))


if __name__ == "__main__":
    sys.exit(main())
