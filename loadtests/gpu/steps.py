"""Times decode steps of the engine with random weights, and the idle gaps between steps.

Each step is compared with the minimum time to read its bytes. Times are device times between two
marks: one before the first kernel of a step, and one after its last kernel. The device is idle from
the end of a step to the start of the next one.
"""

import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.common.sampling_params import SamplingParams
from penstock.kernels.fallback import fallback_counts, forbid_fallback
from penstock.loadtests.gpu.bounds import Bounds
from penstock.loadtests.gpu.clock import Clock, clock_of
from penstock.loadtests.gpu.model_bytes import step_bytes
from penstock.loadtests.gpu.models import SHAPES, random_model, small
from penstock.loadtests.gpu.options import Options, read_options
from penstock.loadtests.gpu.sections import write_figures
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine, make_stepper
from penstock.workers.engine.executor import Executor, LaunchedStep
from penstock.workers.engine.stepper import OverlapStepper
from penstock.workers.scheduling.sequence import NewSequence, StepPlan
from penstock.workers.scheduling.table import SequenceTable


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes of the batches and lengths of their sequences."""

    batches: tuple[int, ...] = (1, 16, 64, 256)  # number of sequences in each measured batch
    input_len: int = 1000
    output_len: int = 96
    num_warmups: int = 16  # number of decode steps of the full batch that precede the measurement
    max_batched_tokens: int = 8192


SMALL_LOAD = Load((1, 3), 20, 12, 2, 64)


@dataclass(frozen=True, slots=True)
class Step:
    """Clock marks of one step in which every sequence decodes a token."""

    begin: Any
    end: Any
    context: float  # mean number of positions per sequence


class Marks:
    """Replacement for `Executor.launch` that records clock marks before and after each launch."""

    def __init__(self, executor: Executor, clock: Clock, batch: int) -> None:
        self.steps: list[Step] = []
        self._executor = executor
        self._clock = clock
        self._batch = batch
        self._launch = executor.launch

    def launch(
        self, plan: StepPlan, before: LaunchedStep | None, table: SequenceTable
    ) -> LaunchedStep:
        with self._executor.computing():
            begin = self._clock.mark()
        launched = self._launch(plan, before, table)
        with self._executor.computing():
            end = self._clock.mark()
        if len(plan.rows) == len(plan.tokens) == self._batch:
            self.steps.append(Step(begin, end, float(plan.context_lens.mean())))
        return launched


def summary(steps: Sequence[Step], clock: Clock, floor: float) -> dict[str, float]:
    """Return statistics of consecutive steps: periods (from end to end) and idle gaps.

    `floor` is the minimum time of a step, in seconds.
    """
    pairs = list(pairwise(steps))
    periods = np.array([clock.seconds(one.end, other.end) for one, other in pairs])
    gaps = np.array([clock.seconds(one.end, other.begin) for one, other in pairs])
    period = float(np.median(periods))
    return {
        "step_us": period * 1e6,
        "step_p99_us": float(np.percentile(periods, 99)) * 1e6,
        "floor_us": floor * 1e6,
        "over_floor": period / floor,
        "gap_p50_us": float(np.median(gaps)) * 1e6,
        "gap_p99_us": float(np.percentile(gaps, 99)) * 1e6,
    }


def decode(engine: Engine, clock: Clock, batch: int, load: Load) -> list[Step]:
    """Decode `batch` sequences to their ends. Return the steps in which all of them decode."""
    rng = np.random.default_rng(batch)
    for number in range(batch):
        prompt = rng.integers(2, engine.spec.vocab_size, load.input_len).tolist()
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=load.output_len)
        engine.submit(NewSequence((batch, number), prompt, len(prompt), params))
    marks, changed = Marks(engine.executor, clock, batch), threading.Condition()
    engine.executor.launch = marks.launch  # type: ignore[method-assign]
    pipeline = make_stepper(engine, changed)
    assert isinstance(pipeline, OverlapStepper)
    left, commanded = batch, True
    try:
        while left:
            result = pipeline.advance(commanded)
            commanded = False
            left -= len(result.finished)
            if result.failed:
                raise RuntimeError(
                    "a model with random weights gave logits that are NaN or infinite: expected "
                    "finite numbers"
                )
            pipeline.plan_next()
            with changed:
                changed.wait_for(lambda: pipeline.due or not pipeline.busy)
    finally:
        pipeline.stop()
        del engine.executor.launch
    return marks.steps[load.num_warmups :]


@contextmanager
def noted_waits(device: torch.device) -> Iterator[list[str]]:
    """Yield a list, which gets the source lines that waited for the device when the context ends.

    `torch.cuda.set_sync_debug_mode` warns about each line that synchronizes implicitly.
    """
    waits: list[str] = []
    if device.type != "cuda":
        yield waits
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waits += sorted({f"{each.filename}:{each.lineno}" for each in caught})


def measure(options: Options, bounds: Bounds, load: Load) -> Iterator[dict[str, Any]]:
    """Yield the results so far after each batch."""
    shape = SHAPES[options.model]
    config = small(shape.config) if options.small else shape.config
    scratch = tempfile.TemporaryDirectory(prefix="penstock-gpu-")
    with scratch as folder, forbid_fallback(options.device):
        decoder = random_model(Path(folder), config, options.dtype, options.device)
        worker = WorkerConfig(
            name="gpu",
            model=Path(folder),
            device=options.device.type,
            max_sequences=max(load.batches),
            max_batched_tokens=load.max_batched_tokens,
            max_model_len=4096 if not options.small else 64,
            kv_cache_mib=4 if options.small else None,
        )
        engine = Engine(worker, decoder=decoder)
    engine.executor.on_device = engine.plans_ahead = True
    clock, spec = clock_of(options.device), decoder.spec
    figures: dict[str, Any] = {"about": shape.about, "batches": {}, "failures": []}
    with forbid_fallback(options.device):
        engine.warm_up(lambda done, total: print(f"captured {done} of {total}", flush=True))
        for batch in load.batches:
            # The first run is a warm-up and is not measured.
            decode(engine, clock, batch, Load((batch,), 4, 2, 0))
            with noted_waits(options.device) as waits:
                steps = decode(engine, clock, batch, load)
            context = float(np.mean([step.context for step in steps]))
            floor = bounds.floor(step_bytes(spec, options.dtype, batch, context), 0)
            figures["batches"][batch] = summary(steps, clock, floor) | {"waits": waits}
            yield figures
    if fallback_counts():
        figures["failures"] += [f"kernel fallbacks were used: {fallback_counts()}"]
    yield figures


def main() -> int:
    options = read_options("steps")
    bounds = Bounds.read(options.bounds)
    for figures in measure(options, bounds, SMALL_LOAD if options.small else Load()):
        write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
