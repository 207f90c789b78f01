"""Unused fraction of allocated KV memory: `python -m penstock.loadtests.micro.kv_waste TRACE`.

The benchmark runs only the batcher, with dummy tokens, under full load: it submits the requests of
a trace in order whenever fewer than 4 are queued. After every step it counts the slots of used
blocks that have not been written.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.common.sampling_params import SamplingParams
from penstock.common.worker_load import WorkerLoad
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.traces import read_trace
from penstock.loadtests.bench.workload import TRACE_BLOCK, TraceRow
from penstock.loadtests.micro.ab_runner import MeasurementFailed, run
from penstock.workers.scheduling.batcher import Batcher, SchedulerConfig
from penstock.workers.scheduling.sequence import NewSequence

_DRAWN = 7
_CHECK_EVERY = 256  # steps between two checks of the reference counts of all blocks


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of the measurement."""

    trace: str = option("", "a trace file", positional=True)
    num_requests: int = option(1000, "number of requests, from the start of the trace")
    max_sequences: int = option(64, "maximum sequences per step")
    num_blocks: int = option(65_536, "blocks in the pool")
    block_size: int = option(16, "tokens per block")
    max_batched_tokens: int = option(2048, "maximum tokens per step")
    save_json: str = option("", "write the results to this file")


@dataclasses.dataclass(slots=True)
class Waste:
    """Numbers of slots, each summed over all steps."""

    steps: int = 0
    unwritten: int = 0  # slots without data in used blocks
    allocated: int = 0  # all slots in used blocks
    most: float = 0.0  # highest fraction of unwritten slots in a step

    def note(self, load: WorkerLoad, block_size: int) -> None:
        allocated = load.used_blocks * block_size
        self.steps += 1
        self.unwritten += load.unwritten_slots
        self.allocated += allocated
        if allocated:
            self.most = max(self.most, load.unwritten_slots / allocated)

    @property
    def fraction(self) -> float:
        return self.unwritten / self.allocated if self.allocated else 0.0


def sequences(rows: Sequence[TraceRow], max_model_len: int) -> Iterator[NewSequence]:
    """Yield the requests of the trace. Their prompts share prefixes as the trace's blocks do."""
    for number, row in enumerate(rows):
        blocks = row.blocks or (number,)
        draws = [np.random.default_rng(block).integers(0, 32_000, TRACE_BLOCK) for block in blocks]
        if not row.blocks:
            draws = [np.random.default_rng(number).integers(0, 32_000, row.input_len)]
        tokens = np.concatenate(draws)[: min(row.input_len, max_model_len - 1)].tolist()
        params = SamplingParams(temperature=0.0, max_tokens=row.output_len)
        yield NewSequence(number, tokens, len(tokens), params)


def measure(rows: Sequence[TraceRow], options: Options) -> Waste:
    """Run all requests to completion, and count slots after every step.

    Raises AssertionError if the batcher's consistency check fails.
    """
    longest = max(row.input_len + row.output_len for row in rows)
    max_model_len = min(longest, options.num_blocks * options.block_size) + 1
    batcher = Batcher(
        SchedulerConfig(
            num_blocks=options.num_blocks,
            max_model_len=max_model_len,
            block_size=options.block_size,
            max_sequences=options.max_sequences,
            max_batched_tokens=options.max_batched_tokens,
        )
    )
    waste, coming = Waste(), sequences(rows, max_model_len)
    while True:
        for new in itertools.islice(coming, max(0, 4 - batcher.load().queued)):
            batcher.submit(new)
        plan = batcher.plan()
        if plan is None:
            return waste
        batcher.commit(plan, np.full(np.count_nonzero(plan.samples), _DRAWN, np.int32))
        batcher.events()
        waste.note(batcher.load(), options.block_size)
        if waste.steps % _CHECK_EVERY == 0:
            batcher.check()


async def _measure(options: Options) -> dict[str, Any]:
    if not options.trace:
        raise MeasurementFailed("no trace is given: pass the path of a trace file")
    rows = read_trace(Path(options.trace))[: options.num_requests]
    waste = measure(rows, options)
    print(
        f"{Path(options.trace).name}: {len(rows):,} requests, {waste.steps:,} steps: "
        f"{waste.fraction:.2%} of allocated slots unwritten on average, {waste.most:.2%} at most"
    )
    return {**dataclasses.asdict(waste), "fraction": waste.fraction}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program = "python -m penstock.loadtests.micro.kv_waste"
    (options,) = read_flags(program, "Unused allocated KV memory.", (Options,), arguments)
    config = {**dataclasses.asdict(options), "trace": Path(options.trace).name}
    return run(lambda: _measure(options), config, options.save_json)


if __name__ == "__main__":
    sys.exit(main())
