"""Measures the performance figures of one source tree, which may be an older commit.

Engine and scheduler are measured by the tree's own regression check. The rest is measured through
interfaces that commits share: `penstock serve`, the gRPC and HTTP APIs, and the command lines of
the standalone router and of the stub workers.
"""

import asyncio
import json
import re
import statistics
import time
import urllib.request
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from penstock.cli import role
from penstock.cli.status import NoStatus
from penstock.loadtests.bench.client_grpc import GrpcClient
from penstock.loadtests.bench.clients import Client, Target
from penstock.loadtests.bench.load import Load
from penstock.loadtests.bench.metrics import Outcome
from penstock.loadtests.bench.workload import Planned, Prompts, ordinary_tokens
from penstock.loadtests.micro import engine_probe
from penstock.loadtests.micro.ab_runner import (
    SHIPPED_MODEL,
    MeasurementFailed,
    checked,
    steady_rate,
)
from penstock.loadtests.micro.cpu_time import cpu_seconds
from penstock.loadtests.micro.router_cpu import grpc_load, http_load
from penstock.loadtests.micro.server import Running, serving
from penstock.loadtests.micro.source_tree import (
    REGRESSION_CHECK,
    STANDALONE_ROUTER,
    STUB_WORKERS,
    SourceTree,
)

Figures = dict[str, float]
_T = TypeVar("_T")

_ROUTER_MODEL = SHIPPED_MODEL.parent / "demo-small"
_WORKER = re.compile(r"ray::WorkerActor|penstock: \w+ worker")
"""Start of a worker's process title: the first form while Ray calls the actor, else the second."""
_TRANSFERRED_BYTES = re.compile(r"^penstock_(?:kv_transfer|handover)_bytes\S* (\S+)$", re.MULTILINE)
"""Router metric for the bytes of KV transfers: its current name, or its name in older commits."""
_PREFILL_WORKER = "prefill-0"
_WARMUP_TOKENS = 20
_TRANSFER_ANSWER = 4  # answer tokens, of which the decode worker generates all but the first


@dataclass(frozen=True, slots=True)
class Amounts:
    """Amount of work in one measurement of a tree."""

    engine_rounds: int = 3
    streams: int = 64  # concurrent streams at the router, each with `stream_tokens` tokens
    stream_tokens: int = 200
    path_rounds: int = 3
    path_requests: int = 16
    path_prompt: int = 64
    path_answer: int = 256
    transfers: int = 64
    transfer_prompt: int = 1024
    transfers_at_once: int = 16
    threads: int = 1


async def measure_tree(tree: SourceTree, amounts: Amounts) -> Figures:
    """Measure all figures once, each in new processes.

    Raises MeasurementFailed, ProgramFailed or ServerFailed.
    """
    return {
        **await measure_engine(tree, amounts),
        **await measure_router(tree, amounts),
        **await measure_serving(tree, amounts),
    }


async def measure_engine(tree: SourceTree, amounts: Amounts) -> Figures:
    """Return the medians of the engine and scheduler ratios of the tree's regression check."""
    numbers = str(amounts.engine_rounds), str(amounts.threads)
    values = await tree.run(engine_probe.__file__, tree.module(REGRESSION_CHECK), *numbers)
    return {name: statistics.median(values[name]) for name in ("decode", "prefill", "scheduler")}


async def measure_router(tree: SourceTree, amounts: Amounts) -> Figures:
    """Return the CPU time of a router per streamed token, in µs, for each API.

    The CPU time of the router's helper processes is included.
    """
    stub_workers = tree.running(tree.module(STUB_WORKERS), "--step-ms", "20")
    async with stub_workers as (_, workers):
        config = {"model": str(_ROUTER_MODEL), "workers": workers}
        router = tree.running(tree.module(STANDALONE_ROUTER), config=config)
        async with router as (pid, addresses):
            figures = {}
            for api, load in (("http", http_load), ("grpc", grpc_load)):
                await load(addresses[api], amounts.streams, _WARMUP_TOKENS)
                before = cpu_seconds(pid)
                num_replies = await load(addresses[api], amounts.streams, amounts.stream_tokens)
                seconds = cpu_seconds(pid) - before
                num_tokens = amounts.streams * amounts.stream_tokens
                if num_replies < num_tokens // 2:
                    raise MeasurementFailed(
                        f"{num_replies} replies came for {num_tokens} tokens, expected at least "
                        f"{num_tokens // 2}: too many tokens were merged into one reply; run again "
                        "on an idle machine"
                    )
                figures[f"router_{api}"] = 1e6 * seconds / num_tokens
            return figures


async def measure_serving(tree: SourceTree, amounts: Amounts) -> Figures:
    """Run `penstock serve` with prefill and decode workers, and measure the server.

    Returns figures of the start, the request path and the KV transfers. Both trees serve the same
    checkpoint, the bundled model of this tree.
    """
    arguments = [str(SHIPPED_MODEL), "--threads", str(amounts.threads)]
    async with serving(arguments, tree) as server:
        began = time.perf_counter()
        client = GrpcClient(Target(server.grpc_address, "grpc"))
        prompts = Prompts(ordinary_tokens(_vocab_size(SHIPPED_MODEL)), seed=0)
        try:
            await _send(client, prompts, [Planned(10**6, 0.0, 8, 1)])
            start = server.ready_seconds + time.perf_counter() - began
            # The transfers come first. The router always transfers KV until it has measured three
            # transfers; on a busy machine, it may then compute all prompts on the decode worker.
            transfer = await _transfer(server, client, prompts, amounts)
            path = await _path(client, prompts, amounts)
            return {"start": start, "path": path, "transfer": transfer}
        finally:
            await client.close()


async def _path(client: Client, prompts: Prompts, amounts: Amounts) -> float:
    """Return the median of the tokens per second while all requests decode."""
    rates = []
    for round_number in range(amounts.path_rounds + 1):
        first = round_number * amounts.path_requests
        plan = [
            Planned(number, 0.0, amounts.path_prompt, amounts.path_answer)
            for number in range(first, first + amounts.path_requests)
        ]
        rates.append(steady_rate(await _send(client, prompts, plan)))
    return statistics.median(rates[1:])  # round 0 is a warm-up and does not count


async def _transfer(server: Running, client: Client, prompts: Prompts, amounts: Amounts) -> float:
    """Return the workers' CPU time per MB of transferred KV blocks, in ms.

    The requests are sent twice. The first time, they end at the prefill worker after one token, and
    the prefix cache keeps their blocks. Only the second time is measured. The prefill worker then
    computes only a few tokens of each prompt, and the decode worker receives all its blocks.

    Routers of newer commits may let a prefill worker generate answers, but not if an operator
    assigned its role. The role is therefore assigned first, in both trees.
    """
    await assign_prefill_role(server)
    numbers = range(10**5, 10**5 + amounts.transfers)
    at_once, length = amounts.transfers_at_once, amounts.transfer_prompt
    cached = [Planned(number, 0.0, length, 1) for number in numbers]
    transferred = [Planned(number, 0.0, length, _TRANSFER_ANSWER) for number in numbers]
    await _send(client, prompts, cached, at_once)
    root = psutil.Process(server.pid)
    workers = [each for each in root.children(recursive=True) if _WORKER.match(_title(each))]
    if len(workers) != 2:
        raise MeasurementFailed(f"expected 2 worker processes, found {len(workers)}")
    before = await _transferred_bytes(server)
    seconds, _ = await _cpu_seconds(workers, _send(client, prompts, transferred, at_once))
    num_bytes = await _transferred_bytes(server) - before
    if not num_bytes:
        raise MeasurementFailed(
            f"no bytes of KV blocks were transferred for {amounts.transfers} requests"
        )
    return 1e3 * seconds / (num_bytes / 1e6)


async def assign_prefill_role(server: Running) -> None:
    """Assign the role prefill to the prefill worker, as an operator. Raises MeasurementFailed."""
    try:
        await asyncio.to_thread(role.change, server.metrics_address, "", _PREFILL_WORKER, "prefill")
    except NoStatus as error:
        raise MeasurementFailed(f"the prefill worker's role was not assigned: {error}") from None


async def _transferred_bytes(server: Running) -> float:
    found = _TRANSFERRED_BYTES.search(
        await asyncio.to_thread(_read_metrics, server.metrics_address)
    )
    if found is None:
        raise MeasurementFailed("the router has no metric for the bytes of KV transfers")
    return float(found[1])


def _read_metrics(metrics_address: str) -> str:
    with urllib.request.urlopen(f"{metrics_address}/metrics", timeout=10.0) as reply:
        return str(reply.read(), "utf-8")


async def _send(
    client: Client, prompts: Prompts, plan: Sequence[Planned], concurrency: int | None = None
) -> Sequence[Outcome]:
    load = Load(client, prompts, plan, concurrency)
    await load.run()
    return checked(load.outcomes)


async def _cpu_seconds(
    processes: Sequence[psutil.Process], work: Coroutine[Any, Any, _T]
) -> tuple[float, _T]:
    """Run `work`. Return the CPU seconds that the processes used, and the result of `work`."""
    before = sum(map(_cpu_used, processes))
    result = await work
    return sum(map(_cpu_used, processes)) - before, result


def _cpu_used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _vocab_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
