"""Runs a router as a process tree and reads its CPU time."""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

import penstock
from penstock.loadtests.comparison.routers.client import KEY
from penstock.loadtests.comparison.routers.routers import Router
from penstock.loadtests.comparison.routers.stubs import WORKER_NAME
from penstock.loadtests.micro.ab_runner import MeasurementFailed
from penstock.loadtests.micro.router import until_ready
from penstock.loadtests.micro.server import free_ports
from penstock.loadtests.micro.standalone_router import standalone_router

_ADAPTERS = Path(__file__).parent / "adapters"
_MODEL = Path(penstock.__file__).parent / "models" / "demo-small"
_START_SECONDS = 240.0
_STOP_SECONDS = 30.0
_LOG_TAIL = 2000  # characters of the log that an error contains


@dataclass(frozen=True, slots=True)
class Target:
    """A server to which clients send requests: a router, or a stub without a router."""

    name: str
    title: str
    address: str  # host:port
    pid: int
    about: dict[str, Any]

    def cpu_seconds(self) -> dict[int, float]:
        """Return the CPU time of the process and each of its descendants, by process id."""
        seconds = {}
        for process in process_tree(self.pid):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds[process.pid] = float(times.user + times.system)
        return seconds


def process_tree(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants, or [] if it has exited."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@asynccontextmanager
async def penstock_router(router: Router, worker: str) -> AsyncIterator[Target]:
    """Run Penstock's router with the stub worker at this address."""
    async with standalone_router(_MODEL, {WORKER_NAME: worker}) as running:
        await until_ready(running.admin, 1)
        yield Target(router.name, router.title, running.http, running.process.pid, {})


@asynccontextmanager
async def peer_router(router: Router, python: Path, stub: str) -> AsyncIterator[Target]:
    """Run another router in front of the OpenAI stub.

    On exit, its whole process tree is ended. Raises MeasurementFailed if the router does not start.
    """
    port, second_port = free_ports(2)
    address = f"127.0.0.1:{port}"
    addresses = {"stub": stub, "address": address, "second_port": second_port, "key": KEY}
    options = json.dumps({**addresses, **router.settings})
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(str(python), str(_ADAPTERS / "host.py"), router.adapter, options),
            env=variables,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            # Prevents Ctrl-C in the terminal from ending the router before this process.
            start_new_session=True,
        )
        try:
            about = await _description(router, process, log)
            yield Target(router.name, router.title, address, process.pid, about)
        finally:
            await _end(process)


async def _description(
    router: Router, process: asyncio.subprocess.Process, log: IO[bytes]
) -> dict[str, Any]:
    assert process.stdout is not None
    line = b""
    with suppress(TimeoutError):
        line = await asyncio.wait_for(process.stdout.readline(), _START_SECONDS)
    if not line:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL))
        words = log.read().decode(errors="replace").strip()
        raise MeasurementFailed(f"{router.title} did not start; end of its log:\n{words}")
    return dict(json.loads(line))


async def _end(process: asyncio.subprocess.Process) -> None:
    tree = process_tree(process.pid)
    assert process.stdin is not None
    process.stdin.close()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    for each in tree:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(tree, timeout=10.0)
    await process.wait()
