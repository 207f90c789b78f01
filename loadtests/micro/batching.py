"""Gain of continuous over static batching: `python -m penstock.loadtests.micro.batching TRACE`.

The benchmark runs only the batcher, with dummy tokens, on the answer lengths of a trace, and counts
decode steps. All requests are queued at the start and have prompts of one token. Static mode admits
a batch only when the previous batch has completely finished, so slots of finished sequences stay
idle.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.traces import read_trace
from penstock.loadtests.micro.ab_runner import MeasurementFailed, run
from penstock.workers.scheduling.batcher import Batcher, SchedulerConfig
from penstock.workers.scheduling.sequence import NewSequence

_DRAWN = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of the measurement."""

    trace: str = option("", "a trace file", positional=True)
    num_requests: int = option(4096, "number of requests, from the start of the trace")
    max_sequences: int = option(32, "maximum sequences per step")
    save_json: str = option("", "write the results to this file")


def num_steps(lengths: Sequence[int], max_sequences: int, static: bool) -> int:
    """Return the number of steps until all answers of these lengths are complete."""
    batcher = Batcher(
        SchedulerConfig(
            num_blocks=max_sequences * (max(lengths) // 16 + 2),
            max_model_len=max(lengths) + 2,
            max_sequences=max_sequences,
            max_batched_tokens=max_sequences,
            max_queued=len(lengths),
            static=static,
        )
    )
    for number, length in enumerate(lengths):
        batcher.submit(NewSequence(number, [_DRAWN], 1, SamplingParams(max_tokens=length)))
    steps = 0
    while (plan := batcher.plan()) is not None:
        batcher.commit(plan, np.full(len(plan.sampling_rows), _DRAWN, np.int32))
        batcher.events()
        steps += 1
    return steps


async def _measure(options: Options) -> dict[str, Any]:
    if not options.trace:
        raise MeasurementFailed("no trace is given: pass the path of a trace file")
    rows = read_trace(Path(options.trace))[: options.num_requests]
    lengths = [max(row.output_len, 1) for row in rows]
    found = {mode: num_steps(lengths, options.max_sequences, mode == "static") for mode in MODES}
    ratio = found["static"] / found["continuous"]
    print(
        f"{Path(options.trace).name}: {len(rows):,} answers, {options.max_sequences} rows: "
        f"{found['static']:,} steps static, {found['continuous']:,} continuous: {ratio:.1f}x"
    )
    return {**found, "ratio": ratio}


MODES = ("static", "continuous")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program = "python -m penstock.loadtests.micro.batching"
    (options,) = read_flags(program, "Static vs. continuous.", (Options,), arguments)
    config = {**dataclasses.asdict(options), "trace": Path(options.trace).name}
    return run(lambda: _measure(options), config, options.save_json)


if __name__ == "__main__":
    sys.exit(main())
