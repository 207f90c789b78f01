"""Measures the CPU time of a router per streamed token, and its parts.

`python -m penstock.loadtests.micro.router_cpu` runs one real router process, one stub worker
without a model and 64 concurrent streams. The streams alternate between HTTP and gRPC. In every
round, a bare grpc.aio server without Penstock's code also sends the same replies at the same rate.
The router's CPU time over gRPC is reported as a multiple of the bare server's CPU time. With
`--against FOLDER`, the router of another source tree takes turns with this one. Every second round
measures the servers in reverse order.

CPU time is that of the server process and its helper processes, so that other load on the machine
matters little. A round has three loads with different numbers of requests, steps and tokens. Their
CPU times give the cost of three terms:

- each request: from the connection to the first token, and its end
- each step of the worker, with everything else that a router does in that time
- each further token
"""

import asyncio
import dataclasses
import json
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

import penstock
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.micro.ab_runner import MeasurementFailed, run
from penstock.loadtests.micro.bare_grpc import bare_server
from penstock.loadtests.micro.cpu_time import cpu_seconds
from penstock.loadtests.micro.router import FanIn, stub_workers, until_ready
from penstock.loadtests.micro.source_tree import STANDALONE_ROUTER, SourceTree
from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc

_ROOT = Path(penstock.__file__).parent.parent
_MODEL = Path(penstock.__file__).parent / "models" / "demo-small"
_PROMPT = "Tell me a story."
_TERMS = ("request", "step", "token")
# In `loads_of`, the first load has this many times the streams of the second load. Both have the
# same number of steps but different numbers of tokens, so the cost of a step can be computed.
_STREAMS_OF_FEW = 16
_BURSTS = 8  # number of bursts sent to measure the cost of a request


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of the measurement."""

    streams: int = option(64, "concurrent streams")
    output_len: int = option(200, "tokens per stream")
    step_ms: float = option(20.0, "step time of the stub worker in milliseconds")
    rounds: int = option(3, "rounds")
    against: str = option("", "folder of another source tree, measured in turns with this one")
    save_json: str = option("", "write the results to this file")


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Streams that begin together. They are repeated once all of them have ended."""

    streams: int
    output_len: int
    repeats: int = 1

    @property
    def num_tokens(self) -> int:
        return self.repeats * self.streams * self.output_len

    @property
    def amounts(self) -> tuple[int, int, int]:
        """Numbers of requests, steps and tokens. A request's first token is not counted."""
        steps = self.repeats * (self.output_len - 1)
        return self.repeats * self.streams, steps, self.streams * steps


def loads_of(options: Options) -> tuple[Load, ...]:
    """Return the load whose CPU time per token is reported, and two loads for the cost terms."""
    streams, few = options.streams, max(options.streams // _STREAMS_OF_FEW, 1)
    return (
        Load(streams, options.output_len),
        Load(few, options.output_len),
        Load(streams, 2, _BURSTS),
    )


def terms_of(loads: Sequence[Load], seconds: Sequence[float]) -> Mapping[str, float]:
    """Return the CPU time (µs) of a request, a step and a token.

    The three values are the solution of three linear equations, one for each load.
    """
    solved = np.linalg.solve(np.array([load.amounts for load in loads], float), np.array(seconds))
    return {name: 1e6 * float(value) for name, value in zip(_TERMS, solved, strict=True)}


# ------------------------------------------------------------ clients


async def http_load(address: str, streams: int, output_len: int) -> int:
    """Read streamed completions over plain sockets and return the number of tokens."""
    body = json.dumps(
        {"model": "stub", "prompt": _PROMPT, "max_tokens": output_len, "stream": True}
        | {"ignore_eos": True, "seed": 1}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = address.split(":")

    async def one() -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        answer = await reader.read(-1)
        writer.close()
        if (count := answer.count(b"data: [DONE]")) != 1:
            raise MeasurementFailed(
                f"a stream had `data: [DONE]` {count} times, expected once: {answer[-300:]!r}"
            )
        return answer.count(b'"text":')

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


async def grpc_load(address: str, streams: int, output_len: int) -> int:
    """Read streams over one gRPC channel and return the number of replies with tokens."""
    sampling = pb.Sampling(max_tokens=output_len, ignore_eos=True, seed=1)
    request = pb.GenerateRequest(text=_PROMPT, sampling=sampling)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]

        async def one() -> int:
            return sum([1 async for reply in stub.Generate(request) if reply.tokens])

        return sum(await asyncio.gather(*(one() for _ in range(streams))))


# ------------------------------------------------------------ measurement


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A measured server, with the API (HTTP or gRPC) over which it is measured."""

    pid: int
    address: str
    load: Callable[[str, int, int], Awaitable[int]]

    async def seconds(self, load: Load) -> float:
        """Return the CPU seconds that a load takes.

        Raises MeasurementFailed if too many tokens were merged into one event or reply.
        """
        before = cpu_seconds(self.pid)
        count = 0
        for _ in range(load.repeats):
            count += await self.load(self.address, load.streams, load.output_len)
        if count < load.num_tokens // 2:
            raise MeasurementFailed(
                f"{count} replies came for {load.num_tokens} tokens, expected at least "
                f"{load.num_tokens // 2}: too many tokens were merged into one reply; run again on "
                "an idle machine"
            )
        return cpu_seconds(self.pid) - before


async def _start(stack: AsyncExitStack, options: Options) -> Mapping[str, Server]:
    """Start all servers and return them by name.

    The servers of this tree are "http" and "grpc".
    """
    fan = FanIn(step_ms=options.step_ms, processes=1)
    workers = await stack.enter_async_context(stub_workers(1, fan))
    trees = {"": SourceTree.at(_ROOT)}
    if options.against:
        trees["against_"] = SourceTree.at(Path(options.against))
    servers: dict[str, Server] = {}
    for prefix, tree in trees.items():
        config = {"model": str(_MODEL), "workers": workers}
        router = tree.running(tree.module(STANDALONE_ROUTER), config=config)
        pid, addresses = await stack.enter_async_context(router)
        await until_ready(addresses["admin"], 1)
        for api, load in (("http", http_load), ("grpc", grpc_load)):
            servers[prefix + api] = Server(pid, addresses[api], load)
    bare, address = await stack.enter_async_context(bare_server(options.step_ms))
    servers["bare"] = Server(bare.pid, address, grpc_load)
    return dict(sorted(servers.items(), key=lambda item: item[0].endswith("grpc")))


def _ratios(row: Mapping[str, float]) -> Mapping[str, float]:
    """Return the ratios of the servers' CPU times in one round."""
    found = {"ratio": row["grpc"] / row["bare"]}
    if "against_http" in row:
        found |= {f"{api}_ratio": row[api] / row[f"against_{api}"] for api in ("http", "grpc")}
    return found


def _median(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


async def measure(options: Options) -> dict[str, Any]:
    """Measure all servers alternately and print a row of results per round."""
    loads = loads_of(options)
    rows: list[dict[str, float]] = []
    async with AsyncExitStack() as stack:
        servers = await _start(stack, options)
        for server in servers.values():
            await server.seconds(Load(options.streams, 20))  # warm-up
        terms: dict[str, list[Mapping[str, float]]] = {name: [] for name in servers}
        print("CPU µs per token; ratio: gRPC / bare gRPC")
        for number in range(options.rounds):
            order = list(servers.items())[:: -1 if number % 2 else 1]
            row: dict[str, float] = {}
            seconds: dict[str, list[float]] = {name: [] for name in servers}
            for load in loads:
                for name, server in order:
                    seconds[name].append(await server.seconds(load))
            for name, found in seconds.items():
                row[name] = 1e6 * found[0] / loads[0].num_tokens
                terms[name].append(terms_of(loads, found))
            row |= _ratios(row)
            rows.append(row)
            print("  ".join(f"{name} {value:.2f}" for name, value in row.items()), flush=True)
    medians = _median(rows)
    print("median:", "  ".join(f"{name} {value:.2f}" for name, value in medians.items()))
    print("CPU µs of each request, each step and each further token (medians):")
    for name, of_server in terms.items():
        shown = "  ".join(f"{term} {value:.1f}" for term, value in _median(of_server).items())
        print(f"{name}: {shown}")
    return {
        "rounds": rows,
        "median": medians,
        "terms": {
            name: {"rounds": found, "median": _median(found)} for name, found in terms.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program, about = "python -m penstock.loadtests.micro.router_cpu", "Router CPU per token."
    (options,) = read_flags(program, about, (Options,), arguments)
    if options.streams < 2 or options.output_len < 3:
        print(
            f"{program}: give --streams of 2 or more and --output-len of 3 or more: the CPU time "
            "is split by loads with fewer streams and tokens",
            file=sys.stderr,
        )
        return 2
    return run(lambda: measure(options), dataclasses.asdict(options), options.save_json)


if __name__ == "__main__":
    sys.exit(main())
