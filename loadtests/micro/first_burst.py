"""Throughput of the first requests after a server is ready, relative to later requests.

`python -m penstock.loadtests.micro.first_burst` starts a new server in every round and sends it
bursts of concurrent requests as soon as it is ready. If the first burst is as fast as the second
one, a ready server is fully warmed up. The ratio of the second to the third burst shows the noise.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from penstock.loadtests.bench.client_grpc import GrpcClient
from penstock.loadtests.bench.clients import Target
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.load import Load
from penstock.loadtests.bench.workload import Planned, Prompts, ordinary_tokens
from penstock.loadtests.micro.ab_runner import Quantiles, Setup, run, whole_rate
from penstock.loadtests.micro.server import serving


@dataclasses.dataclass(frozen=True, slots=True)
class Bursts:
    """Requests of a round, and the number of rounds."""

    rounds: int = option(5, "number of servers to start, one after another")
    bursts: int = option(3, "bursts per server; at least 3")
    requests: int = option(64, "requests per burst, all sent at once")
    input_len: int = option(128, "prompt tokens")
    output_len: int = option(64, "answer tokens")
    temperature: float = option(1.0, "sampling temperature; 0 is greedy")


async def burst_rates(setup: Setup, bursts: Bursts) -> tuple[list[float], float]:
    """Start a server and send all bursts to it.

    Returns:
        Tokens per second of each burst, from its first request to its last token; and the seconds
        from the start of the server until it was ready.
    """
    rates = []
    async with serving(setup.serve_arguments()) as server:
        client = GrpcClient(Target(server.grpc_address, "grpc", temperature=bursts.temperature))
        try:
            served = await client.describe()
            assert served.vocab_size is not None, (
                "the gRPC server reported no vocabulary size, which every gRPC server must report"
            )
            prompts = Prompts(ordinary_tokens(served.vocab_size), seed=0)
            for number in range(bursts.bursts):
                load = Load(client, prompts, _plan(bursts, number))
                await load.run()
                rates.append(whole_rate(load.outcomes))
        finally:
            await client.close()
    return rates, server.ready_seconds


def _plan(bursts: Bursts, number: int) -> list[Planned]:
    """Plan one burst. Every request has a unique prompt, so that the prefix cache never hits."""
    first = number * bursts.requests
    return [
        Planned(each, 0.0, bursts.input_len, bursts.output_len)
        for each in range(first, first + bursts.requests)
    ]


async def _measure(setup: Setup, bursts: Bursts) -> dict[str, Any]:
    if bursts.bursts < 3:
        raise ValueError(f"--bursts must be at least 3, not {bursts.bursts}")
    rounds = [await burst_rates(setup, bursts) for _ in range(bursts.rounds)]
    quantiles = {
        "first_to_second": Quantiles.of([rates[0] / rates[1] for rates, _ in rounds]),
        "second_to_third": Quantiles.of([rates[1] / rates[2] for rates, _ in rounds]),
        "first_tokens_per_second": Quantiles.of([rates[0] for rates, _ in rounds]),
        "second_tokens_per_second": Quantiles.of([rates[1] for rates, _ in rounds]),
        "ready_seconds": Quantiles.of([seconds for _, seconds in rounds]),
    }
    for name, value in quantiles.items():
        print(f"{name.replace('_', ' ')}: {value}")
    return {name: dataclasses.asdict(value) for name, value in quantiles.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program = "python -m penstock.loadtests.micro.first_burst"
    about = "Throughput of the first burst after a server is ready, relative to later ones."
    setup, bursts = read_flags(program, about, (Setup, Bursts), arguments)
    config = {**dataclasses.asdict(setup), **dataclasses.asdict(bursts)}
    return run(lambda: _measure(setup, bursts), config, setup.save_json)


if __name__ == "__main__":
    sys.exit(main())
