"""A worker in a process of its own: `python -m tests.support.worker_process CONFIG`.

CONFIG is a WorkerConfig as JSON, and `slow_gather`: seconds that each message of a hand-over takes.
Says its address on stdout; ends when its stdin does.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.workers.config import WorkerConfig
from penstock.workers.scheduling.sequence import Ints
from penstock.workers.service import serve_worker
from penstock.workers.transfer import source
from penstock.workers.transfer.shards import Shard
from penstock.workers.transfer.staging import KvStaging

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class WorkerProcess:
    process: asyncio.subprocess.Process
    address: str

    async def kill(self) -> None:
        """As by -9: no word of farewell."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def worker_process(
    name: str, checkpoint: Path, **config: Any
) -> AsyncIterator[WorkerProcess]:
    """Start one and wait until it serves; it is gone at the end."""
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
        async with asyncio.timeout(120):
            address = (await process.stdout.readline()).decode().strip()
        assert address, "the worker has ended"
        yield WorkerProcess(process, address)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def main() -> None:
    config = json.loads(sys.argv[1])
    seconds = config.pop("slow_gather", 0.0)
    if seconds:
        slow_down(seconds)
    running = await serve_worker(WorkerConfig(**{**config, "model": Path(config["model"])}))
    print(running.address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await running.stop()


def slow_down(seconds: float) -> None:
    gather = KvStaging.gather

    def slow(staging: KvStaging, blocks: Ints, shard: Shard) -> torch.Tensor:
        time.sleep(seconds)
        return gather(staging, blocks, shard)

    KvStaging.gather = slow  # type: ignore[method-assign, assignment]
    source.MESSAGE_BYTES = 1


if __name__ == "__main__":
    asyncio.run(main())
