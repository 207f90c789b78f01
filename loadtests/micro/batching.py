"""What continuous batching gains over static: `python -m penstock.loadtests.micro.batching TRACE`.

The scheduler alone, with made-up tokens, over the answers' lengths of a trace, all requests there
from the start and prompts of one token: what is counted are decode steps. In the static mode a
batch is let in when the last one has ended, so a step of it costs a slot a row that has ended too.
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
    """What is run."""

    trace: str = option("", "a trace file", positional=True)
    num_requests: int = option(4096, "of the trace's first")
    max_sequences: int = option(32, "rows")
    save_json: str = option("", "write what was measured to this file")


def num_steps(lengths: Sequence[int], max_sequences: int, static: bool) -> int:
    """Steps until answers of these lengths are all there."""
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
    while (plan := batcher.plan(0.0)) is not None:
        batcher.commit(plan, np.full(len(plan.sampling_rows), _DRAWN, np.int32))
        batcher.events()
        steps += 1
    return steps


async def _measure(options: Options) -> dict[str, Any]:
    if not options.trace:
        raise MeasurementFailed("which trace? Name a file")
    rows = read_trace(Path(options.trace))[: options.num_requests]
    lengths = [max(row.output_len, 1) for row in rows]
    found = {mode: num_steps(lengths, options.max_sequences, mode == "static") for mode in MODES}
    ratio = found["static"] / found["continuous"]
    print(
        f"{Path(options.trace).name}: {len(rows):,} answers in {options.max_sequences} rows: "
        f"{found['static']:,} steps static, {found['continuous']:,} continuous: {ratio:.1f} times"
    )
    return {**found, "ratio": ratio}


MODES = ("static", "continuous")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save; return the exit code."""
    program = "python -m penstock.loadtests.micro.batching"
    (options,) = read_flags(program, "Static against continuous.", (Options,), arguments)
    config = {**dataclasses.asdict(options), "trace": Path(options.trace).name}
    return run(lambda: _measure(options), config, options.save_json)


if __name__ == "__main__":
    sys.exit(main())
