"""Measures the cost of `--deterministic`: times one engine with it and one engine without it.

The deterministic engine must first pass the check that workers run at their start. The section
fails if a chunked prompt and a whole prompt do not give bitwise identical results. Times are device
times (see `steps`).
"""

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.common.sampling_params import SamplingParams
from penstock.kernels.fallback import fallback_counts, forbid_fallback
from penstock.loadtests.gpu.clock import Clock, clock_of
from penstock.loadtests.gpu.models import SHAPES, random_model, small
from penstock.loadtests.gpu.options import Options, read_options
from penstock.loadtests.gpu.sections import write_figures
from penstock.loadtests.gpu.steps import SMALL_LOAD, Load, decode
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.determinism_check import check_batch_invariance
from penstock.workers.engine.engine import Engine
from penstock.workers.scheduling.sequence import NewSequence

LOAD = Load(batches=(1, 16, 64), input_len=1000, output_len=64)
PROMPTS = (2000, 4000)  # lengths of the prompts, in tokens
ROUNDS = 3


def make_engine(folder: Path, options: Options, load: Load, deterministic: bool) -> Engine:
    """Create an engine with random weights, which are the same in both modes."""
    shape = SHAPES[options.model]
    config = small(shape.config) if options.small else shape.config
    decoder = random_model(folder, config, options.dtype, options.device, deterministic)
    worker = WorkerConfig(
        name="gpu",
        model=folder,
        device=options.device.type,
        deterministic=deterministic,
        max_sequences=max(load.batches),
        max_batched_tokens=load.max_batched_tokens,
        max_model_len=64 if options.small else 4200,
        kv_cache_mib=4 if options.small else 6144,
    )
    engine = Engine(worker, decoder=decoder)
    engine.executor.on_device = engine.plans_ahead = True
    if deterministic:
        check_batch_invariance(engine)
    engine.warm_up()
    return engine


def step_seconds(engine: Engine, clock: Clock, batch: int, load: Load) -> float:
    """Return the median seconds (device time) of a decode step of `batch` sequences."""
    steps = decode(engine, clock, batch, load)
    return statistics.median(clock.seconds(step.begin, step.end) for step in steps)


def prompt_seconds(engine: Engine, clock: Clock, length: int) -> float:
    """Return the seconds from the start of a prompt of `length` tokens to its first answer token.

    The engine runs nothing else during this time.
    """
    tokens = np.random.default_rng(length).integers(2, engine.spec.vocab_size, length).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    engine.submit(
        NewSequence("prompt", tokens, length, params, salt=b"%d" % engine.load().num_steps)
    )
    with engine.executor.computing():
        begin = clock.mark()
    while not engine.step().finished:
        pass
    with engine.executor.computing():
        return clock.seconds(begin, clock.mark())


def measure(options: Options, load: Load, prompts: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield the results so far after each measurement."""
    clock, rounds = clock_of(options.device), 1 if options.small else ROUNDS
    figures: dict[str, Any] = {"about": SHAPES[options.model].about, "prices": {}, "failures": []}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder,
        forbid_fallback(options.device),
    ):
        engines = [make_engine(Path(folder), options, load, each) for each in (False, True)]
        work: dict[str, Callable[[Engine], float]] = {}
        for batch in load.batches:
            work[f"decode step of {batch}"] = partial(
                step_seconds, clock=clock, batch=batch, load=load
            )
        for length in prompts:
            work[f"prompt of {length}"] = partial(prompt_seconds, clock=clock, length=length)
        for name, seconds_of in work.items():
            for engine in engines:
                seconds_of(engine)  # the first measurement is a warm-up and does not count
            taken = [[seconds_of(engine) for engine in engines] for _ in range(rounds)]
            figures["prices"][name] = _price(taken)
            yield figures
    if fallback_counts():
        figures["failures"] += [f"kernel fallbacks were used: {fallback_counts()}"]
    yield figures


def _price(taken: list[list[float]]) -> dict[str, float]:
    ratios = [deterministic / plain for plain, deterministic in taken]
    return {
        "plain_us": 1e6 * statistics.median(plain for plain, _ in taken),
        "deterministic_us": 1e6 * statistics.median(other for _, other in taken),
        "times": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def main() -> int:
    options = read_options("deterministic")
    load, prompts = (SMALL_LOAD, (40,)) if options.small else (LOAD, PROMPTS)
    torch.manual_seed(0)
    for figures in measure(options, replace(load, num_warmups=4), prompts):
        write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
