"""Measures the cost of `--deterministic` with two engines that take turns.

`python -m penstock.loadtests.micro.determinism` runs a batch of requests, a single request and a
long prompt on both engines in this process. The engines take turns in going first. For each round,
the ratio of the deterministic engine's time to the other engine's time is computed.
"""

# ruff: noqa: I001  (`micro.engine` must be imported first: it tunes the process before torch)

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.loadtests.micro import engine as one
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.micro.ab_runner import Quantiles, run
from penstock.loadtests.micro.random_llama import write_random_llama

import numpy as np

from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of the measurement; the model is a random Llama with 125 million parameters."""

    threads: int = option(2, "threads of each engine; one engine computes at a time")
    rounds: int = option(5, "measured rounds, after one warm-up round")
    batch: int = option(64, "requests in the batch")
    input_len: int = option(128, "prompt tokens of each request")
    output_len: int = option(64, "answer tokens of each request")
    long_len: int = option(1024, "tokens of the long prompt")
    quantization: str = option("none", "weight quantization: none or int8")
    cpu_time: bool = option(False, "measure CPU time instead of wall time; needs --threads 1")
    save_json: str = option("", "write the results to this file")


# Name, batch size, settings, and the function that returns the time to compare.
Cell = tuple[str, int, one.Options, Callable[[one.RoundTimes], float]]


def cells(options: Options) -> list[Cell]:
    """Return the cells to measure on both engines."""
    batched = one.Options(
        input_len=options.input_len, output_len=options.output_len, cpu_time=options.cpu_time
    )
    long = dataclasses.replace(batched, input_len=options.long_len, output_len=2)
    return [
        ("batch_whole", options.batch, batched, lambda times: times.seconds),
        ("batch_decode_step", options.batch, batched, _step),
        ("batch_prefill", options.batch, batched, lambda times: times.prefill_seconds),
        ("single_decode_step", 1, batched, _step),
        ("long_prefill", 1, long, lambda times: times.prefill_seconds),
    ]


def _step(times: one.RoundTimes) -> float:
    return float(np.median(times.decode_steps))


def run_round(engines: Sequence[Engine], wanted: Sequence[Cell], number: int) -> dict[str, float]:
    """Run all cells once. For each cell, return the second engine's time divided by the first's."""
    measured: dict[tuple[int, int], list[one.RoundTimes]] = {}
    ratios = {}
    for name, batch, cell_options, seconds in wanted:
        key = (batch, cell_options.input_len)
        if key not in measured:
            seed = 10**6 * len(measured) + number
            order = (0, 1) if number % 2 else (1, 0)
            taken = {at: one.run_round(engines[at], cell_options, batch, seed) for at in order}
            measured[key] = [taken[0], taken[1]]
        plain, deterministic = measured[key]
        ratios[name] = seconds(deterministic) / seconds(plain)
    return ratios


def _engines(options: Options, folder: Path) -> list[Engine]:
    model = write_random_llama(folder)
    config = WorkerConfig(
        "engine",
        model,
        kv_cache_mib=1024,
        max_sequences=options.batch,
        threads=options.threads,
        quantization=options.quantization,
    )
    both = [config, dataclasses.replace(config, deterministic=True)]
    engines = [Engine(each) for each in both]
    for each in engines:
        each.warm_up()
    return engines


async def _measure(options: Options) -> dict[str, Any]:
    if options.cpu_time and options.threads != 1:
        raise ValueError("--cpu-time measures one thread: pass --threads 1 as well")
    with tempfile.TemporaryDirectory() as folder:
        engines = _engines(options, Path(folder) / "llama")
    wanted = cells(options)
    rounds = [run_round(engines, wanted, number) for number in range(options.rounds + 1)][1:]
    quantiles = {name: Quantiles.of([ratios[name] for ratios in rounds]) for name in rounds[0]}
    for name, ratio in quantiles.items():
        print(f"{name.replace('_', ' ')}: takes {ratio} times as long", flush=True)
    return {name: dataclasses.asdict(ratio) for name, ratio in quantiles.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program = "python -m penstock.loadtests.micro.determinism"
    about = "Cost of --deterministic: runs one engine with it and one without, alternating."
    (options,) = read_flags(program, about, (Options,), arguments)
    return run(lambda: _measure(options), dataclasses.asdict(options), options.save_json)


if __name__ == "__main__":
    sys.exit(main())
