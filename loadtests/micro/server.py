"""Runs `penstock serve` on free ports for the duration of a measurement."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.loadtests.micro.source_tree import SourceTree

START_SECONDS = 180.0
STOP_SECONDS = 60.0
_POLL_SECONDS = 0.05
_LOWEST_PORT = 20000  # lowest port to use, since `ray start` uses 10002 to 19999 for its workers
_OWN_PORTS = "PENSTOCK_FREE_PORTS"
"""Environment variable with a port range LOW-HIGH, so that concurrent runs use separate ports."""


class ServerFailed(RuntimeError):
    """Raised if the server did not start, or if it exited.

    The message contains the end of the server's output.
    """


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready for requests."""

    grpc_address: str  # host:port
    http_address: str  # address for clients, as http://host:port
    metrics_address: str  # address of the metrics, as http://host:port
    pid: int
    ready_seconds: float  # seconds from the start of the server until it was ready


@asynccontextmanager
async def serving(
    arguments: Sequence[str], tree: SourceTree | None = None
) -> AsyncIterator[Running]:
    """Run `penstock serve` with these arguments and free ports. Raises ServerFailed.

    Args:
        tree: the source tree to run; None means the tree of this process.
    """
    http_port, grpc_port, metrics_port = free_ports(3)
    ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    if tree is None or tree.has_admin_port:
        ports += ["--admin-port", str(metrics_port)]
    else:
        metrics_port = http_port
    command = [sys.executable, "-m", "penstock.cli", "serve", *arguments, *ports]
    with tempfile.TemporaryDirectory(prefix="penstock-loadtest-") as folder:
        output_path = Path(folder) / "output"
        began = time.perf_counter()
        with output_path.open("wb") as output:
            # The server gets its own session, so that Ctrl-C in the terminal does not interrupt it.
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=tree.root if tree else None,
                env=tree.variables if tree else None,
            )
        try:
            address = f"127.0.0.1:{grpc_port}"
            await _until_ready(process, address, output_path)
            seconds = time.perf_counter() - began
            http, metrics = (f"http://127.0.0.1:{port}" for port in (http_port, metrics_port))
            yield Running(address, http, metrics, process.pid, seconds)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT so that the server drains. After STOP_SECONDS, kill its process group."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_ports(count: int, run: int = 1) -> list[int]:
    """Return `count` different ports. Each is the first of `run` consecutive free ports.

    Ports in the ranges of ephemeral ports and of Ray workers are not returned, because another
    process could take such a port before the server binds it.
    """
    found: list[int] = []
    low, high = _range()
    for port in random.sample(range(low, high - run, run), 1000 // run):
        if all(map(_is_free, range(port, port + run))):
            found.append(port)
        if len(found) == count:
            return found
    raise ServerFailed(f"found fewer than {count} free ports between {low} and {high}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _range() -> tuple[int, int]:
    low, dash, high = os.environ.get(_OWN_PORTS, "").partition("-")
    return (int(low), int(high)) if dash else (_LOWEST_PORT, _first_outgoing())


def _first_outgoing() -> int:
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        low = 32768
    return low if low - _LOWEST_PORT >= 1000 else 65536


async def _until_ready(process: subprocess.Popen[bytes], address: str, output_path: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with grpc.aio.insecure_channel(
        address, options=[("grpc.max_reconnect_backoff_ms", 200)]
    ) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while not await _is_ready(health):
            if process.poll() is not None or time.monotonic() > deadline:
                state = "exited" if process.poll() is not None else "is not ready"
                words = output_path.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
                seconds = time.monotonic() - deadline + START_SECONDS
                raise ServerFailed(
                    f"penstock serve {state} after {seconds:.0f} s; its output:\n{words}"
                )
            await asyncio.sleep(_POLL_SECONDS)


async def _is_ready(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
    except grpc.RpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
