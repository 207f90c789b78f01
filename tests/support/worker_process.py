"""A worker as a separate process: `python -m tests.support.worker_process CONFIG`.

CONFIG is a WorkerConfig as JSON, with `hash_key` in hexadecimal and three more keys:

    slow_gather: seconds by which each message of a KV transfer is delayed
    hang_after: number of steps after which a step hangs; a watchdog is started
    meeting: address of the rendezvous server; rank 0 sets it for the other ranks that it starts

The process prints its address. It ends when its stdin is closed; after SIGTERM it drains, prints
"drained" and ends.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from penstock.cluster.processes.descriptors import reserve_descriptors
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.model_runner import ModelRunner
from penstock.workers.health.watchdog import Watchdog
from penstock.workers.kv_transfer import sender
from penstock.workers.kv_transfer.shards import Shard
from penstock.workers.kv_transfer.staging import KvStaging
from penstock.workers.parallel.rendezvous import RemoteStore, RendezvousServer
from penstock.workers.rank.follower import Follower
from penstock.workers.scheduling.sequence import Ints, StepPlan
from penstock.workers.service.grpc_service import serve_worker

DRAIN_SECONDS = 60.0
TIMEOUT_SECONDS = 240.0  # limit in seconds; long, because machines may be busy
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class WorkerProcess:
    process: asyncio.subprocess.Process
    address: str

    async def drained(self) -> None:
        """Drain the worker and wait until it has ended."""
        self.process.terminate()
        assert self.process.stdout is not None
        async with asyncio.timeout(TIMEOUT_SECONDS):
            assert (await self.process.stdout.readline()) == b"drained\n"
            await self.process.wait()

    async def kill(self) -> None:
        """Kill the worker with SIGKILL."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def worker_process(
    name: str, checkpoint: Path, **config: Any
) -> AsyncIterator[WorkerProcess]:
    """Start a worker, wait until it serves, and kill it at the end of the block."""
    given = {"name": name, "model": str(checkpoint), "kv_cache_mib": 1, **config}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.worker_process",
        json.dumps(given),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            address = (await process.stdout.readline()).decode().strip()
        assert address, "the worker has ended"
        yield WorkerProcess(process, address)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def main() -> None:
    reserve_descriptors()
    given = json.loads(sys.argv[1])
    paths = {name: Path(given[name]) for name in ("model", "crash_dump_dir") if name in given}
    sizes = {**given, **paths}
    seconds, meeting = sizes.pop("slow_gather", 0.0), sizes.pop("meeting", "")
    num_steps = sizes.pop("hang_after", None)
    if seconds:
        slow_down(seconds)
    if "hash_key" in sizes:
        sizes["hash_key"] = bytes.fromhex(sizes["hash_key"])
    config = WorkerConfig(**sizes)
    if meeting:
        Follower(config, RemoteStore(meeting, "secret"), lambda done, total: None).run()
    else:
        asyncio.run(lead(config, given, num_steps))


async def lead(config: WorkerConfig, given: dict[str, Any], num_steps: int | None) -> None:
    num_ranks, others, store, watchdog = config.coord.mesh.num_ranks, [], None, None
    if num_ranks > 1:
        meeting = RendezvousServer("127.0.0.1", "secret", num_ranks)
        store = meeting.store
        for rank in range(1, num_ranks):
            settings = json.dumps({**given, "rank": rank, "meeting": meeting.address})
            command = (sys.executable, "-m", "tests.support.worker_process", settings)
            others.append(await asyncio.create_subprocess_exec(*command, cwd=ROOT))
    if num_steps is not None:
        watchdog = Watchdog(config.name, config.step_timeout_seconds, config.crash_dump_dir)
    running = await serve_worker(config, store=store, watchdog=watchdog)
    if watchdog is not None and num_steps is not None:
        hang(num_steps)
        watchdog.start()
    loop, received_sigterm = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, received_sigterm.set)
    print(running.address, flush=True)
    ended = loop.run_in_executor(None, sys.stdin.read)
    sigterm = asyncio.create_task(received_sigterm.wait())
    await asyncio.wait((ended, sigterm), return_when=asyncio.FIRST_COMPLETED)
    if sigterm.done():
        await running.drain(DRAIN_SECONDS)
        print("drained", flush=True)
    await running.stop()
    for other in others:
        await other.wait()
    if sigterm.done():
        os._exit(0)  # a normal exit would wait for the thread that reads stdin


def hang(num_steps: int) -> None:
    run = ModelRunner.run
    left = count(num_steps, -1)

    def run_or_hang(
        runner: ModelRunner, plan: StepPlan, *more: Any, **options: Any
    ) -> torch.Tensor:
        while next(left) <= 0:
            time.sleep(3600)
        return run(runner, plan, *more, **options)

    ModelRunner.run = run_or_hang  # type: ignore[method-assign, assignment]


def slow_down(seconds: float) -> None:
    gather = KvStaging.gather

    def slow(
        staging: KvStaging,
        blocks: Ints,
        shard: Shard,
        unit: int | None = None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        time.sleep(seconds)
        return gather(staging, blocks, shard, unit, into)

    KvStaging.gather = slow  # type: ignore[method-assign, assignment]
    sender.max_data_bytes = lambda backend: 1


if __name__ == "__main__":
    main()
