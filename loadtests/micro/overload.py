"""Measures a real router under more load than its workers can serve.

`python -m penstock.loadtests.micro.overload` runs one router process and sends it an open-loop
load. Its stub workers have fixed step times and a bounded number of sequences. The capacity is the
highest rate at which 99% of the requests keep both goals: the first token within 1 s, and 50 ms per
further token. The figures and goals are those of `penstock simulate overload`, in wall time:

- at three times the capacity, the goodput is at most 5% lower than at the capacity, and the p99
  TTFT of admitted requests is at most twice as high;
- one greedy tenant among ten costs the others at most 5% of their goodput.

Steps are slow and slots are few, so that neither the router nor the clients limit the capacity. The
result is one JSON object. The exit code is 1 if a goal is missed. Use a quiet machine.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import uvloop

import penstock
from penstock.cli.status import NoStatus, fetch
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.workload import Lengths, Planned
from penstock.loadtests.micro.ab_runner import MeasurementFailed
from penstock.loadtests.micro.overload_workers import WorkerOptions
from penstock.loadtests.micro.router import CpuUsage
from penstock.loadtests.micro.standalone_router import StandaloneRouter, standalone_router
from penstock.loadtests.simulator.scaling.call import Call
from penstock.loadtests.simulator.scaling.overload import (
    GREEDY,
    KEPT,
    NUM_TENANTS,
    Outcome,
    Overload,
    load_of,
    missed,
    outcome_of,
)
from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc

_MODEL = Path(penstock.__file__).parent / "models" / "demo-small"
_OPERATOR = "key-of-the-operator"
_READY_SECONDS = 60.0
_PAUSE_SECONDS = 12.0
"""Pause between two loads.

After this time, the router no longer uses the speed at which the queue of the first load moved.
"""

Rates = Sequence[tuple[str, float]]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadOptions:
    """Load of the measurement."""

    input_len: str = option("64", "prompt tokens, as for penstock bench")
    output_len: str = option("16-48", "answer tokens")
    factor: float = option(3.0, "request rate of the overload, as a multiple of the capacity")
    max_wait: float = option(0.6, "the router's max_wait_seconds; 0: no bound")
    seconds: float = option(20.0, "seconds during which requests arrive, per load")
    tries: int = option(5, "number of loads that find the capacity")
    seed: int = option(0, "seed of arrival times, lengths and prompts")
    save_json: str = option("", "write the results to this file")


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """A router with workers, and the options of the load."""

    router: StandaloneRouter
    load: LoadOptions
    workers: WorkerOptions

    def estimate(self) -> float:
        """Return the request rate at which nearly all sequence slots of the workers are in use."""
        num_running = self.workers.count * self.workers.max_sequences
        lengths = Lengths.parse(self.load.output_len)
        tokens = (lengths.low + lengths.high) / 2
        return num_running / (tokens * self.workers.step_ms / 1000)


@asynccontextmanager
async def bounded_workers(options: WorkerOptions) -> AsyncIterator[dict[str, str]]:
    """Run bounded stub workers in one process; yield their addresses by name."""
    flags = [f"--{name.replace('_', '-')}" for name in dataclasses.asdict(options)]
    values = map(str, dataclasses.asdict(options).values())
    arguments = [each for pair in zip(flags, values, strict=True) for each in pair]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.loadtests.micro.overload_workers", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise MeasurementFailed("the workers did not start: see their output above")
        yield json.loads(line)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def until_ready(router: StandaloneRouter, count: int) -> None:
    """Wait until all workers are ready at the router."""
    began, ready = time.perf_counter(), 0
    while time.perf_counter() - began < _READY_SECONDS:
        with contextlib.suppress(NoStatus):
            status = await asyncio.to_thread(fetch, router.admin, _OPERATOR)
            ready = sum(each["state"] == "ready" for each in status["workers"])
            if ready == count:
                return
        await asyncio.sleep(0.2)
    raise MeasurementFailed(
        f"{ready} workers were ready after {_READY_SECONDS:g} s: expected {count}"
    )


def key_of(tenant: str) -> str:
    """Return the API key of a tenant."""
    return f"key-of-{tenant or 'all'}"


def api_keys() -> list[dict[str, str]]:
    """Return the API keys for the router's configuration: all tenants' and the operator's."""
    tenants = ["", *(f"tenant-{number}" for number in range(NUM_TENANTS))]
    users = [{"name": tenant or "all", "key": key_of(tenant)} for tenant in tenants]
    return [*users, {"name": "operator", "key": _OPERATOR, "role": "operator"}]


async def _send(stub: Any, call: Call, tenant: str, began: float, random_: random.Random) -> None:
    prompt = [random_.randrange(300, 900) for _ in range(call.planned.input_len)]
    request = pb.GenerateRequest(
        tokens=pb.Tokens(ids=prompt),
        sampling=pb.Sampling(max_tokens=call.planned.output_len, ignore_eos=True, seed=1),
    )
    metadata = (("authorization", f"Bearer {key_of(tenant)}"),)
    try:
        async for reply in stub.Generate(request, metadata=metadata, timeout=120.0):
            now = time.perf_counter() - began
            if not call.num_tokens:
                call.first = now
            call.last = now
            call.num_tokens += len(reply.tokens)
        call.status = "ok" if call.num_tokens == call.planned.output_len else "failed"
    except grpc.aio.AioRpcError as error:
        refused = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.status = "overloaded" if refused else "failed"


async def send_load(
    address: str, load: Sequence[Planned], tenants: Sequence[str], seed: int
) -> list[Call]:
    """Send each request when it is due and return all calls.

    A request does not wait for the end of earlier ones.
    """
    calls, random_ = [Call(each) for each in load], random.Random(seed)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        await stub.ListModels(
            pb.ListModelsRequest(), metadata=(("authorization", f"Bearer {key_of('')}"),)
        )  # connects before the measurement begins
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for call, tenant in zip(calls, tenants, strict=True):
                await asyncio.sleep(max(began + call.planned.due - time.perf_counter(), 0.0))
                tasks.create_task(_send(stub, call, tenant, began, random_))
    return calls


def counted_calls(calls: Sequence[Call], tenants: Sequence[str]) -> list[Call]:
    """Return the calls to evaluate.

    If there are several tenants, the calls of the greedy tenant are left out.
    """
    others = set(tenants) - {GREEDY}
    if not others:
        return list(calls)
    return [call for call, tenant in zip(calls, tenants, strict=True) if tenant != GREEDY]


async def run_load(bench: Bench, rates: Rates) -> Outcome:
    """Send one load, and wait until all answers have ended and the router is idle again."""
    options = bench.load
    shape = Overload(
        input_len=options.input_len,
        output_len=options.output_len,
        seconds=options.seconds,
        seed=options.seed,
    )
    load, tenants = load_of(shape, rates)
    calls = await send_load(bench.router.grpc, load, tenants, options.seed)
    if failed := sum(call.status == "failed" for call in calls):
        raise MeasurementFailed(
            f"{failed} of {len(calls)} requests failed with an error other than overload: "
            "expected none; see the server's log"
        )
    outcome = outcome_of(counted_calls(calls, tenants), options.seconds)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in dataclasses.asdict(outcome).items())
    print(f"{sum(rate for _, rate in rates):.1f} requests/s: {shown}", file=sys.stderr, flush=True)
    await asyncio.sleep(_PAUSE_SECONDS)
    return outcome


async def find_capacity(bench: Bench) -> tuple[float, Outcome]:
    """Find the highest rate at which a fraction `KEPT` of the requests keeps its goals."""
    low, high, best = 0.0, 1.25 * bench.estimate(), None
    for number in range(bench.load.tries):
        rate = 0.8 * bench.estimate() if number == 0 else (low + high) / 2
        outcome = await run_load(bench, [("", rate)])
        if outcome.kept >= KEPT:
            low, best = rate, outcome
        else:
            high = rate
    if best is None:
        raise MeasurementFailed(
            f"fewer than {KEPT:.0%} of the requests met the goals at each of the "
            f"{bench.load.tries} rates that were tried: expected at least one rate that is low "
            "enough"
        )
    return low, best


async def measure(load: LoadOptions, workers: WorkerOptions) -> dict[str, Any]:
    """Return the figures of all loads and the goals that are missed."""
    config = {"api_keys": api_keys(), "max_wait_seconds": load.max_wait}
    async with (
        bounded_workers(workers) as addresses,
        standalone_router(_MODEL, addresses, **config) as router,
    ):
        await until_ready(router, workers.count)
        bench = Bench(router, load, workers)
        await run_load(bench, [("", 0.5 * bench.estimate())])  # warm-up
        rate, capacity = await find_capacity(bench)
        own, of_router = CpuUsage(psutil.Process()), CpuUsage(psutil.Process(router.process.pid))
        own.start()
        of_router.start()
        above = await run_load(bench, [("", load.factor * rate)])
        cores = {"clients": own.utilization(), "router": of_router.utilization()}
        tenth = rate / NUM_TENANTS
        others = [(f"tenant-{number}", tenth) for number in range(1, NUM_TENANTS)]
        equal = await run_load(bench, [(GREEDY, tenth), *others])
        greedy = await run_load(bench, [(GREEDY, load.factor * rate), *others])
    outcomes = {"capacity": capacity, "overload": above, "equal": equal, "greedy": greedy}
    return {
        "options": {**dataclasses.asdict(load), **dataclasses.asdict(workers)},
        **{name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()},
        "cores": cores,
        "missed": missed(outcomes),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print its figures and return the exit code.

    Returns:
        0 if all goals are reached, 1 if one is missed or the measurement failed, 2 for wrong
        options, 130 after Ctrl-C.
    """
    program = "python -m penstock.loadtests.micro.overload"
    about = "A router under more load than its workers can serve."
    load, workers = read_flags(program, about, (LoadOptions, WorkerOptions), arguments)
    if load.tries < 1 or load.seconds <= 0 or load.factor < 1 or load.max_wait < 0:
        print(
            f"{program}: --tries, --seconds, --factor or --max-wait is too small", file=sys.stderr
        )
        return 2
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(measure(load, workers))
    except (MeasurementFailed, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    text = json.dumps(report, indent=1)
    print(text)
    if load.save_json:
        Path(load.save_json).write_text(text + "\n", encoding="utf-8")
    return 0 if report["missed"] == [] else 1


if __name__ == "__main__":
    sys.exit(main())
