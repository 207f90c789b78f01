"""Runs a server of these load tests in a process of its own."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.loadtests.micro.ab_runner import MeasurementFailed


@asynccontextmanager
async def child_server(
    module: str, *arguments: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run `python -m module arguments`. Yield the process and the server's address (host:port).

    The process prints its address first, and exits at the end of its stdin.

    Raises:
        MeasurementFailed: the process ended without an address.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = (await process.stdout.readline()).decode().strip()
        if not address:
            called = " ".join((module, *arguments))
            raise MeasurementFailed(f"{called} did not start: see its output above")
        yield process, address
    finally:
        process.stdin.close()
        await process.wait()
