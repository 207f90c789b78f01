"""Measures the cost of additional workers at one router.

`python -m penstock.loadtests.micro.router` runs one real router process. Stub workers in other
processes use the real worker protocol. The benchmark sends requests at the same rate with few and
with many workers, and reports the router's memory, CPU time and added latency for each number of
workers. Token ids encode the time at which they were generated, and stub workers answer
immediately, so the latencies are those of the router and its connections only.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

import penstock
from penstock.cli.status import fetch
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.metrics import Summary
from penstock.loadtests.micro.ab_runner import MeasurementFailed, run
from penstock.loadtests.micro.standalone_router import StandaloneRouter, standalone_router
from penstock.loadtests.micro.stub_workers import age_of
from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc

_MODEL = Path(penstock.__file__).parent / "models" / "demo-small"
_READY_SECONDS = 120.0
_LINE_BYTES = 1 << 20
_MB = 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class FanIn:
    """Settings of the measurement."""

    workers: tuple[str, ...] = option(("1", "100", "1000"), "numbers of workers to measure")
    rate: float = option(20.0, "requests per second")
    input_len: int = option(64, "prompt tokens")
    output_len: int = option(32, "answer tokens")
    step_ms: float = option(20.0, "step time of a stub worker in milliseconds")
    seconds: float = option(20.0, "seconds under load per measurement; idle: half of it")
    processes: int = option(2, "number of processes for the stub workers")
    seed: int = option(0, "seed of arrival times and prompts")
    save_json: str = option("", "write the results to this file")


@dataclasses.dataclass(slots=True)
class Received:
    """Latencies measured by the clients, in seconds."""

    # Seconds until the first token of each request.
    first: list[float] = dataclasses.field(default_factory=list)
    # Seconds between the generation of each token and its arrival.
    ages: list[float] = dataclasses.field(default_factory=list)
    num_failed: int = 0


@dataclasses.dataclass(slots=True)
class CpuUsage:
    """CPU usage of a process since `start`."""

    process: psutil.Process
    cpu: float = 0.0
    began: float = 0.0

    def start(self) -> None:
        self.cpu, self.began = self._used(), time.perf_counter()

    def utilization(self) -> float:
        """Return the mean number of cores that the process used since `start`."""
        return (self._used() - self.cpu) / (time.perf_counter() - self.began)

    def _used(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def stub_workers(count: int, fan: FanIn) -> AsyncIterator[dict[str, str]]:
    """Run `count` stub workers in several processes and yield their addresses by name."""
    processes: list[asyncio.subprocess.Process] = []
    addresses: dict[str, str] = {}
    num_processes = min(fan.processes, count)
    firsts = [count * index // num_processes for index in range(num_processes + 1)]
    try:
        for first, end in pairwise(firsts):
            numbers = ["--first", str(first), "--count", str(end - first)]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.loadtests.micro.stub_workers", *numbers),
                *("--step-ms", str(fan.step_ms)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
            )
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            line = await process.stdout.readline()
            if not line:
                raise MeasurementFailed("stub workers did not start: see their output above")
            addresses |= json.loads(line)
        yield addresses
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def until_ready(admin: str, count: int) -> float:
    """Wait until all workers are ready at a router and return the seconds of waiting.

    `admin` is the address of the router's port for operators.
    """
    began, ready = time.perf_counter(), 0
    while time.perf_counter() - began < _READY_SECONDS:
        status = await asyncio.to_thread(fetch, admin, None)
        ready = sum(each["state"] == "ready" for each in status["workers"])
        if ready == count:
            return time.perf_counter() - began
        await asyncio.sleep(0.2)
    raise MeasurementFailed(
        f"{ready} workers were ready after {_READY_SECONDS:g} s: expected {count}"
    )


async def _one(stub: Any, fan: FanIn, random_: random.Random, seen: Received) -> None:
    prompt = [random_.randrange(300, 900) for _ in range(fan.input_len)]
    request = pb.GenerateRequest(
        tokens=pb.Tokens(ids=prompt),
        sampling=pb.Sampling(max_tokens=fan.output_len, ignore_eos=True, seed=1),
    )
    began, num_tokens = time.perf_counter(), 0
    try:
        async for reply in stub.Generate(request, timeout=60.0):
            if not num_tokens:
                seen.first.append(time.perf_counter() - began)
            num_tokens += len(reply.tokens)
            seen.ages.extend(map(age_of, reply.tokens))
    except grpc.RpcError:
        num_tokens = 0
    seen.num_failed += num_tokens != fan.output_len


async def load(router: StandaloneRouter, fan: FanIn, seconds: float) -> Received:
    """Send requests with Poisson arrivals for `seconds`, then wait for their answers."""
    seen, random_ = Received(), random.Random(fan.seed)
    due, end = 0.0, time.perf_counter() + seconds
    async with grpc.aio.insecure_channel(router.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        await stub.ListModels(pb.ListModelsRequest())  # connects before the measurement begins
        async with asyncio.TaskGroup() as tasks:
            began = time.perf_counter()
            while (now := time.perf_counter()) < end:
                due += random_.expovariate(fan.rate)
                await asyncio.sleep(max(began + due - now, 0.0))
                tasks.create_task(_one(stub, fan, random_, seen))
    return seen


async def measure_one(count: int, fan: FanIn) -> dict[str, Any]:
    """Measure the router with `count` workers."""
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(stub_workers(count, fan))
        router = await stack.enter_async_context(standalone_router(_MODEL, workers))
        connecting = await until_ready(router.admin, count)
        await load(router, fan, 2.0)  # warm-up
        watch = CpuUsage(psutil.Process(router.process.pid))
        watch.start()
        await asyncio.sleep(fan.seconds / 2)
        idle = watch.utilization()
        watch.start()
        seen = await load(router, fan, fan.seconds)
        busy = watch.utilization()
        if seen.num_failed:
            raise MeasurementFailed(f"{seen.num_failed} requests failed with {count} workers")
        return {
            "workers": count,
            "requests": len(seen.first),
            "connect_seconds": connecting,
            "pss_mb": watch.process.memory_full_info().pss / _MB,
            "idle_cores": idle,
            "busy_cores": busy,
            "first_token_ms": dataclasses.asdict(Summary.of(seen.first)),
            "token_ms": dataclasses.asdict(Summary.of(seen.ages)),
        }


async def measure(fan: FanIn) -> dict[str, Any]:
    """Measure each number of workers, and print a row of results for each."""
    print(
        f"{fan.rate:g} requests per second, {fan.input_len} tokens in, {fan.output_len} out, "
        f"steps of {fan.step_ms:g} ms\n"
    )
    names = ("workers", "PSS MB", "idle cores", "busy cores", "first token ms", "token ms")
    print("  ".join(f"{name:>16}" for name in names), " (p50 p99)")
    rows = []
    for text in fan.workers:
        row = await measure_one(int(text), fan)
        rows.append(row)
        first, token = row["first_token_ms"], row["token_ms"]
        cells = (
            str(row["workers"]),
            f"{row['pss_mb']:.0f}",
            f"{row['idle_cores']:.3f}",
            f"{row['busy_cores']:.3f}",
            f"{first['median']:.2f} {first['p99']:.2f}",
            f"{token['median']:.2f} {token['p99']:.2f}",
        )
        print("  ".join(f"{cell:>16}" for cell in cells), flush=True)
    return {"fan_in": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program, about = "python -m penstock.loadtests.micro.router", "Cost of workers at one router."
    (fan,) = read_flags(program, about, (FanIn,), arguments)
    if not all(text.isdecimal() and int(text) for text in fan.workers):
        print(f"{program}: --workers must be whole numbers, 1 or more", file=sys.stderr)
        return 2
    return run(lambda: measure(fan), dataclasses.asdict(fan), fan.save_json)


if __name__ == "__main__":
    sys.exit(main())
