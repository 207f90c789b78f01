"""Measures the speed of one engine relative to the machine's limits at the same time.

`python -m penstock.loadtests.micro.engine` runs a batch of requests and then a single request on an
engine in this process. These runs alternate with measurements of matmul rate and memory bandwidth.
The results are the fractions of these limits that the engine reaches. With `--cpu-time`, CPU time
of this thread replaces wall time, for machines with other load.
"""

# ruff: noqa: E402  (`tune_process` must run before torch is imported)

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.workers.rank.process_tuning import tune_process

tune_process()  # must run before torch is imported

import numpy as np
import torch

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.micro.ab_runner import Quantiles, run
from penstock.loadtests.micro.random_llama import Shape, write_random_llama
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.scheduling.sequence import NewSequence


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of the measurement; the model is a random Llama with 125 million parameters."""

    threads: int = option(2, "threads of the engine")
    rounds: int = option(5, "measured rounds, after one warm-up round")
    batch: int = option(64, "requests in the batch")
    input_len: int = option(128, "prompt tokens")
    output_len: int = option(64, "answer tokens")
    quantization: str = option("none", "weight quantization: none or int8")
    kv_cache_dtype: str = option(
        "auto", "format of the KV cache: auto, float32, bfloat16, fp8 or int8"
    )
    cpu_time: bool = option(False, "measure CPU time instead of wall time; needs --threads 1")

    @property
    def clock(self) -> Callable[[], float]:
        return time.thread_time if self.cpu_time else time.perf_counter

    save_json: str = option("", "write the results to this file")


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The machine's limits, measured just before a round."""

    flops: float  # FLOP/s of one large float32 matmul
    bytes: float  # bytes per second that are read from memory


@dataclasses.dataclass(slots=True)
class RoundTimes:
    """Times of one run of a batch, in seconds."""

    seconds: float = 0.0  # duration of the whole run
    # Seconds of each decode step.
    decode_steps: list[float] = dataclasses.field(default_factory=list)
    prefill_seconds: float = 0.0  # seconds of all steps that computed prompt tokens


def measure_limits(clock: Callable[[], float], seconds: float = 0.5) -> Limits:
    """Measure both limits. Each is the rate of the fastest call within `seconds`."""
    a, b = torch.randn(1024, 2048), torch.randn(2048, 2048)
    memory = torch.ones(64 << 20)
    product = _fastest(lambda: torch.mm(a, b), clock, seconds)
    read = _fastest(lambda: memory.sum(), clock, seconds)
    return Limits(2 * a.numel() * b.shape[1] / product, memory.nbytes / read)


def _fastest(work: Callable[[], Any], clock: Callable[[], float], seconds: float) -> float:
    best, end = float("inf"), clock() + seconds
    while (began := clock()) < end:
        work()
        best = min(best, clock() - began)
    return best


def run_round(engine: Engine, options: Options, batch: int, seed: int) -> RoundTimes:
    """Run a batch of random prompts, with `options.output_len` answer tokens each."""
    clock, input_len = options.clock, options.input_len
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len)
    prompts = np.random.default_rng(seed).integers(2, engine.spec.vocab_size, (batch, input_len))
    for number, prompt in enumerate(prompts.tolist()):
        engine.submit(NewSequence(number, prompt, input_len, params))
    times = RoundTimes()
    left, began, last = batch, clock(), clock()
    while left:
        computed = engine.load().prompt_tokens_computed
        result = engine.step()
        now = clock()
        if engine.load().prompt_tokens_computed > computed:
            times.prefill_seconds += now - last
        else:
            times.decode_steps.append(now - last)
        last = now
        if result.failed:
            raise ValueError("the model's logits contain NaN or infinity: expected finite numbers")
        left -= len(result.finished)
    times.seconds = last - began
    return times


@dataclasses.dataclass(slots=True)
class Figures:
    """Measured values by name. Each list has one value per round."""

    values: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def note(self, **values: float) -> None:
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)


def note(
    figures: Figures, batched: RoundTimes, single: RoundTimes, limits: Limits, options: Options
) -> None:
    """Add the results of one round to `figures`: times, rates and fractions of the limits."""
    shape, batch = Shape(), options.batch
    whole = shape.block_weights + shape.head_weights
    tokens = batch * options.output_len
    prefill_flops = 2 * batch * (shape.block_weights * options.input_len + shape.head_weights)
    decode_flops = 2 * batch * whole
    batched_step, single_step = (
        float(np.median(batched.decode_steps)),
        np.median(single.decode_steps),
    )
    least = prefill_flops + decode_flops * (options.output_len - 1)
    figures.note(
        output_tokens_per_second=tokens / batched.seconds,
        tpot_batch_ms=batched_step * 1e3,
        tpot_single_ms=float(single_step) * 1e3,
        ttft_single_ms=single.prefill_seconds * 1e3,
        matmul_gflops=limits.flops / 1e9,
        memory_gbps=limits.bytes / 1e9,
        total_to_matmul_limit=least / batched.seconds / limits.flops,
        prefill_to_matmul_limit=prefill_flops / batched.prefill_seconds / limits.flops,
        decode_to_matmul_limit=decode_flops / batched_step / limits.flops,
        single_to_memory_limit=4 * whole / float(single_step) / limits.bytes,
        prefill_fraction=batched.prefill_seconds / batched.seconds,
    )


async def _measure(options: Options) -> dict[str, Any]:
    if options.cpu_time and options.threads != 1:
        raise ValueError("--cpu-time measures one thread: pass --threads 1 as well")
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_llama(Path(folder) / "llama")
        config = WorkerConfig(
            "engine",
            model,
            max_sequences=options.batch,
            threads=options.threads,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
        )
        engine = Engine(config)
    engine.warm_up()
    engine.cache.data.zero_()  # page faults of first writes must not slow measured runs
    figures = Figures()
    for number in range(options.rounds + 1):
        limits = measure_limits(options.clock)
        batched = run_round(engine, options, options.batch, number)
        single = run_round(engine, options, 1, 10**6 + number)
        if number:
            note(figures, batched, single, limits, options)
    quantiles = {name: Quantiles.of(values) for name, values in figures.values.items()}
    for name, value in quantiles.items():
        print(f"{name.replace('_', ' ')}: {value}", flush=True)
    return {name: dataclasses.asdict(value) for name, value in quantiles.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program = "python -m penstock.loadtests.micro.engine"
    about = "Speed of one engine relative to this machine's limits."
    (options,) = read_flags(program, about, (Options,), arguments)
    return run(lambda: _measure(options), dataclasses.asdict(options), options.save_json)


if __name__ == "__main__":
    sys.exit(main())
