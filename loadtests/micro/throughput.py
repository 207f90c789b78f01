"""Measures decode throughput through `penstock serve` relative to the engine alone.

`python -m penstock.loadtests.micro.throughput` alternately sends a batch of requests through
`penstock serve`, and runs the same batch on an engine in this process. It measures the tokens per
second of the whole batch, and those while all requests decode.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from penstock.loadtests.bench.client_grpc import GrpcClient
from penstock.loadtests.bench.clients import Target
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.load import Load
from penstock.loadtests.bench.metrics import Outcome
from penstock.loadtests.bench.workload import Planned, Prompts, ordinary_tokens
from penstock.loadtests.micro.ab_runner import (
    NeverAllDecoding,
    Quantiles,
    Setup,
    run,
    steady_rate,
    whole_rate,
)
from penstock.loadtests.micro.engine_client import EngineClient
from penstock.loadtests.micro.server import serving


@dataclasses.dataclass(frozen=True, slots=True)
class Requests:
    """Number and lengths of the requests, and the number of rounds."""

    concurrency: int = option(16, "requests in the batch")
    rounds: int = option(7, "measured rounds, after one warm-up round")
    input_len: int = option(64, "prompt tokens")
    output_len: int = option(256, "answer tokens")


@dataclasses.dataclass(slots=True)
class Rates:
    """Tokens per second of `penstock serve` or of the engine alone, one value per round."""

    # Rate while all requests decode; None if there was no such time.
    steady: list[float | None] = dataclasses.field(default_factory=list)
    # Rate of the whole run, including prefill.
    whole: list[float] = dataclasses.field(default_factory=list)

    def note(self, outcomes: Sequence[Outcome]) -> None:
        self.whole.append(whole_rate(outcomes))
        try:
            self.steady.append(steady_rate(outcomes))
        except NeverAllDecoding:
            self.steady.append(None)

    def decode_rates(self) -> list[float]:
        """Return the rate of each round while all requests decoded.

        Raises:
            NeverAllDecoding: in some round, there was no such time.
        """
        rates = [rate for rate in self.steady if rate is not None]
        if len(rates) < len(self.steady):
            raise NeverAllDecoding
        return rates


async def measure_rounds(setup: Setup, requests: Requests) -> tuple[Rates, Rates]:
    """Return the rates through `penstock serve` and those of the engine alone."""
    engine = EngineClient(setup.model_folder, setup.engine_threads)
    prompts = Prompts(ordinary_tokens(engine.vocab_size), seed=0)
    path, direct = Rates(), Rates()
    async with serving(setup.serve_arguments()) as server:
        client = GrpcClient(Target(server.grpc_address, "grpc"))
        try:
            for round_number in range(requests.rounds + 1):
                plan = _plan(requests, round_number)
                load = Load(client, prompts, plan)
                await load.run()
                tokens = [prompts.tokens(planned) for planned in plan]
                answers = engine.run(tokens, requests.output_len)
                if round_number:
                    path.note(load.outcomes)
                    direct.note(answers)
        finally:
            await client.close()
    return path, direct


async def _measure(setup: Setup, requests: Requests) -> dict[str, Any]:
    return figures(*await measure_rounds(setup, requests))


def _plan(requests: Requests, round_number: int) -> list[Planned]:
    """Plan the requests of one round. Every prompt is new, so that the prefix cache never hits."""
    first = round_number * requests.concurrency
    return [
        Planned(number, 0.0, requests.input_len, requests.output_len)
        for number in range(first, first + requests.concurrency)
    ]


def figures(path: Rates, direct: Rates) -> dict[str, Any]:
    """Print and return quantiles of the rates (tokens per second) and of their ratios.

    The decode rates are left out if, in some round, the requests never all decoded at once.
    """
    pairs = {"with_prefill": (path.whole, direct.whole)}
    try:
        pairs["decode"] = (path.decode_rates(), direct.decode_rates())
    except NeverAllDecoding as error:
        print(f"decode: not measured, because {error}")
    quantiles = {}
    for name, (through_path, engine_only) in pairs.items():
        quantiles[f"{name}_ratio"] = Quantiles.of(ratios(through_path, engine_only))
        quantiles[f"{name}_through_path"] = Quantiles.of(through_path)
        quantiles[f"{name}_engine_alone"] = Quantiles.of(engine_only)
    for name, value in quantiles.items():
        print(f"{name.replace('_', ' ')}: {value}")
    return {name: dataclasses.asdict(value) for name, value in quantiles.items()}


def ratios(path: Sequence[float], direct: Sequence[float]) -> list[float]:
    """Return `path` divided by `direct` for each round."""
    return [whole / bare for whole, bare in zip(path, direct, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program = "python -m penstock.loadtests.micro.throughput"
    about = "Decode throughput through the whole path, relative to the engine alone."
    setup, requests = read_flags(program, about, (Setup, Requests), arguments)
    config = {**dataclasses.asdict(setup), **dataclasses.asdict(requests)}
    return run(lambda: _measure(setup, requests), config, setup.save_json)


if __name__ == "__main__":
    sys.exit(main())
