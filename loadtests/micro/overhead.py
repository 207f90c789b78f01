"""Measures how much router, worker service and network add to the engine's TTFT.

`python -m penstock.loadtests.micro.overhead` sends one request at a time. The overhead is the
client's TTFT through `penstock serve`, minus the TTFT of an engine in this process for the same
prompt. The two measurements alternate.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from penstock.loadtests.bench.client_grpc import GrpcClient
from penstock.loadtests.bench.client_http import HttpClient
from penstock.loadtests.bench.clients import Client, Target
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.load import Load
from penstock.loadtests.bench.workload import Planned, Prompts, ordinary_tokens
from penstock.loadtests.micro.ab_runner import Quantiles, Setup, checked, run
from penstock.loadtests.micro.engine_client import EngineClient
from penstock.loadtests.micro.server import Running, serving

_NUM_WARMUPS = 5
_SEED = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Requests:
    """Number and lengths of the requests."""

    num_requests: int = option(50, "number of requests for each API")
    input_len: int = option(128, "prompt tokens")
    output_len: int = option(8, "answer tokens; with two or more, the request changes workers")


@dataclasses.dataclass(slots=True)
class RoundTimes:
    """TTFT of each request in milliseconds, in the order of sending."""

    ttft: list[float] = dataclasses.field(default_factory=list)  # times through `penstock serve`
    prefill: list[float] = dataclasses.field(default_factory=list)  # times of the engine alone

    def without(self, count: int) -> "RoundTimes":
        """Return these times without the first `count` requests."""
        return RoundTimes(self.ttft[count:], self.prefill[count:])

    def added(self) -> list[float]:
        return [whole - bare for whole, bare in zip(self.ttft, self.prefill, strict=True)]

    def figures(self) -> dict[str, Any]:
        """Return quantiles, over the requests, of both times and of their difference."""
        columns = {"added_ms": self.added(), "ttft_ms": self.ttft, "prefill_ms": self.prefill}
        return {name: dataclasses.asdict(Quantiles.of(values)) for name, values in columns.items()}


async def _measure(setup: Setup, requests: Requests) -> dict[str, Any]:
    engine = EngineClient(setup.model_folder, setup.engine_threads)
    prompts = Prompts(ordinary_tokens(engine.vocab_size), _SEED)
    async with serving(setup.serve_arguments()) as server:
        clients = _clients(server)
        try:
            times = await _run_rounds(clients, engine, prompts, requests)
        finally:
            for client in clients.values():
                await client.close()
    for name, taken in times.items():
        _print(name, taken)
    return {"added": {name: taken.figures() for name, taken in times.items()}}


def _clients(server: Running) -> dict[str, Client]:
    return {
        "grpc": GrpcClient(Target(server.grpc_address, "grpc")),
        "completions": HttpClient(Target(server.http_address, "completions")),
    }


async def _run_rounds(
    clients: dict[str, Client], engine: EngineClient, prompts: Prompts, requests: Requests
) -> dict[str, RoundTimes]:
    """Send each request, and run its prompt on the engine directly, in turn.

    The warm-up requests are left out of the result.
    """
    times = {name: RoundTimes() for name in clients}
    for client in clients.values():
        await client.describe()
    for number in range((requests.num_requests + _NUM_WARMUPS) * len(clients)):
        # Every prompt is new, so that the prefix cache never hits.
        name = list(clients)[number % len(clients)]
        planned = Planned(number, 0.0, requests.input_len, requests.output_len)
        load = Load(clients[name], prompts, [planned])
        await load.run()
        times[name].ttft.append(checked(load.outcomes)[0].ttft * 1000)
        times[name].prefill.append(engine.prefill(prompts.tokens(planned)) * 1000)
    return {name: taken.without(_NUM_WARMUPS) for name, taken in times.items()}


def _print(name: str, times: RoundTimes) -> None:
    print(f"{name}: the whole path adds {Quantiles.of(times.added())} ms to TTFT")
    print(f"    TTFT {Quantiles.of(times.ttft)} ms; engine alone {Quantiles.of(times.prefill)} ms")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program, about = (
        "python -m penstock.loadtests.micro.overhead",
        "Overhead of the whole path in TTFT.",
    )
    setup, requests = read_flags(program, about, (Setup, Requests), arguments)
    config = {**dataclasses.asdict(setup), **dataclasses.asdict(requests)}
    return run(lambda: _measure(setup, requests), config, setup.save_json)


if __name__ == "__main__":
    sys.exit(main())
