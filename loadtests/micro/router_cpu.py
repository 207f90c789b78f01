"""Measures the CPU time of a router per streamed token.

`python -m penstock.loadtests.micro.router_cpu` runs one real router process, one stub worker
without a model and 64 concurrent streams, alternating between HTTP and gRPC. In every round, a bare
grpc.aio server without Penstock's code also sends the same replies at the same rate. The router's
CPU time over gRPC is reported as a multiple of the bare server's CPU time. CPU time of the server
process is used, so that other load on the machine matters little.
"""

import asyncio
import dataclasses
import json
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import uvloop

import penstock
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.micro.ab_runner import MeasurementFailed, run
from penstock.loadtests.micro.router import FanIn, stub_workers, until_ready
from penstock.loadtests.micro.standalone_router import standalone_router
from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc

_MODEL = Path(penstock.__file__).parent / "models" / "demo-small"
_PROMPT = "Tell me a story."


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of the measurement."""

    streams: int = option(64, "concurrent streams")
    output_len: int = option(200, "tokens per stream")
    step_ms: float = option(20.0, "step time of the stub worker in milliseconds")
    rounds: int = option(3, "rounds")
    save_json: str = option("", "write the results to this file")


async def http_load(address: str, streams: int, output_len: int) -> int:
    """Read streamed completions over plain sockets; return the number of tokens."""
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
        if answer.count(b"data: [DONE]") != 1:
            raise MeasurementFailed(f"a stream did not end well: {answer[-300:]!r}")
        return answer.count(b'"text":')

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


async def grpc_load(address: str, streams: int, output_len: int) -> int:
    """Read streams over one gRPC channel; return the number of replies with tokens."""
    sampling = pb.Sampling(max_tokens=output_len, ignore_eos=True, seed=1)
    request = pb.GenerateRequest(text=_PROMPT, sampling=sampling)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]

        async def one() -> int:
            return sum([1 async for reply in stub.Generate(request) if reply.tokens])

        return sum(await asyncio.gather(*(one() for _ in range(streams))))


class _BareServer(inference_pb2_grpc.InferenceServicer):
    """A bare gRPC server that sends one token per tick to each stream."""

    def __init__(self, step_seconds: float) -> None:
        self._tick = asyncio.Event()
        self._step_seconds = step_seconds

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_seconds)
            self._tick.set()
            self._tick = asyncio.Event()

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        last = request.sampling.max_tokens - 1
        for position in range(last + 1):
            await self._tick.wait()
            reply = pb.GenerateReply(position=position, tokens=(300 + position,), text=" token")
            reply.request_id = "gen-17d0c2f1a5b3e000"
            reply.seed = 1
            if position == last:
                reply.finish_reason = "length"
                reply.usage.completion_tokens = last + 1
            await context.write(reply)


async def _serve_bare(step_seconds: float) -> None:
    servicer, server = _BareServer(step_seconds), grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ticking = asyncio.create_task(servicer.run())
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    ticking.cancel()
    await server.stop(None)


@asynccontextmanager
async def bare_server(step_ms: float) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run the bare server in its own process; yield the process and the server's address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.loadtests.micro.router_cpu", "serve-bare", str(step_ms)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()
        await process.wait()


async def _cpu_per_token(pid: int, load: Awaitable[int], expected: int) -> float:
    """Run `load`; return the CPU seconds per token that the process used in that time."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    count = await load
    after = process.cpu_times()
    if count < expected // 2:
        raise MeasurementFailed(f"{count} replies came for {expected} tokens: too many were merged")
    return (after.user + after.system - before.user - before.system) / expected


async def measure(options: Options) -> dict[str, Any]:
    """Measure HTTP, gRPC and the bare server alternately, and print a row of results per round."""
    num_tokens = options.streams * options.output_len
    fan = FanIn(step_ms=options.step_ms, processes=1)
    rows: list[dict[str, float]] = []
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(stub_workers(1, fan))
        router = await stack.enter_async_context(standalone_router(_MODEL, workers))
        bare, bare_address = await stack.enter_async_context(bare_server(options.step_ms))
        await until_ready(router, 1)
        loads = {
            "http": (router.process.pid, http_load, router.http),
            "grpc": (router.process.pid, grpc_load, router.grpc),
            "bare": (bare.pid, grpc_load, bare_address),
        }
        for _, load, address in loads.values():
            await load(address, options.streams, 20)  # warm-up
        print("CPU µs per token:  HTTP  gRPC  bare gRPC  gRPC / bare")
        for _ in range(options.rounds):
            row = {
                name: 1e6
                * await _cpu_per_token(
                    pid, load(address, options.streams, options.output_len), num_tokens
                )
                for name, (pid, load, address) in loads.items()
            }
            row["ratio"] = row["grpc"] / row["bare"]
            rows.append(row)
            print("  ".join(f"{name} {value:.2f}" for name, value in row.items()), flush=True)
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {"rounds": rows, "median": medians}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement; print and save its results; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["serve-bare"]:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_bare(float(arguments[1]) / 1000))
        return 0
    program, about = "python -m penstock.loadtests.micro.router_cpu", "Router CPU per token."
    (options,) = read_flags(program, about, (Options,), arguments)
    return run(lambda: measure(options), dataclasses.asdict(options), options.save_json)


if __name__ == "__main__":
    sys.exit(main())
