"""What the whole path adds to the first token: `python -m penstock.loadtests.micro.overhead`.

One request at a time: the client's time to the first token through `penstock serve`, less the time
that the engine, called directly in this process, takes for the same prompt. Taken in turns.
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
    """What is sent."""

    num_requests: int = option(50, "how many of each kind")
    input_len: int = option(128, "prompt tokens")
    output_len: int = option(8, "answer tokens; with two or more, the answer changes workers")


@dataclasses.dataclass(slots=True)
class RoundTimes:
    """Milliseconds of each request, in the order of sending."""

    ttft: list[float] = dataclasses.field(default_factory=list)
    prefill: list[float] = dataclasses.field(default_factory=list)

    def without(self, count: int) -> "RoundTimes":
        """The same without the first few."""
        return RoundTimes(self.ttft[count:], self.prefill[count:])

    def added(self) -> list[float]:
        return [whole - bare for whole, bare in zip(self.ttft, self.prefill, strict=True)]

    def figures(self) -> dict[str, Any]:
        """The spreads of both and of their differences, a request at a time."""
        columns = {"added_ms": self.added(), "ttft_ms": self.ttft, "prefill_ms": self.prefill}
        return {name: dataclasses.asdict(Quantiles.of(values)) for name, values in columns.items()}


async def _measure(setup: Setup, requests: Requests) -> dict[str, Any]:
    engine = EngineClient(setup.model_folder, setup.threads)
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
    """Send a request, then prefill its prompt directly, and so on; the first few do not count."""
    times = {name: RoundTimes() for name in clients}
    for client in clients.values():
        await client.describe()
    for number in range((requests.num_requests + _NUM_WARMUPS) * len(clients)):
        # A prompt of its own each time: none is in a prefix cache.
        name = list(clients)[number % len(clients)]
        planned = Planned(number, 0.0, requests.input_len, requests.output_len)
        load = Load(clients[name], prompts, [planned])
        await load.run()
        times[name].ttft.append(checked(load.outcomes)[0].ttft * 1000)
        times[name].prefill.append(engine.prefill(prompts.tokens(planned)) * 1000)
    return {name: taken.without(_NUM_WARMUPS) for name, taken in times.items()}


def _print(name: str, times: RoundTimes) -> None:
    print(f"{name}: the whole path adds {Quantiles.of(times.added())} ms to the first token")
    print(
        f"    TTFT {Quantiles.of(times.ttft)} ms; the engine's own {Quantiles.of(times.prefill)} ms"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save; return the exit code."""
    program, about = (
        "python -m penstock.loadtests.micro.overhead",
        "What the path adds to the first token.",
    )
    setup, requests = read_flags(program, about, (Setup, Requests), arguments)
    config = {**dataclasses.asdict(setup), **dataclasses.asdict(requests)}
    return run(lambda: _measure(setup, requests), config, setup.save_json)


if __name__ == "__main__":
    sys.exit(main())
