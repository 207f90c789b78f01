"""Runs a router in its own process, without Ray.

`python -m penstock.loadtests.micro.standalone_router` reads one line of JSON from stdin: the fields
of a `RouterConfig`, with `hash_key` in hexadecimal, and `workers`, a mapping of names to addresses.
The process prints the router's addresses as one line of JSON, and exits when stdin is closed.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from penstock.common.api_key import ApiKey
from penstock.protos.serving.grpc_settings import configure_grpc
from penstock.router.config import RouterConfig


@dataclass(frozen=True, slots=True)
class StandaloneRouter:
    """A running router process with its addresses."""

    process: asyncio.subprocess.Process
    http: str  # host:port
    grpc: str  # host:port
    admin: str  # host:port


@asynccontextmanager
async def standalone_router(
    model: Path, workers: Mapping[str, str], **config: Any
) -> AsyncIterator[StandaloneRouter]:
    """Run a router with these workers on free ports. The router is stopped on exit.

    Raises RuntimeError if the router does not start.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.loadtests.micro.standalone_router"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    given = {"model": str(model), "workers": dict(workers), **config}
    try:
        process.stdin.write(json.dumps(given).encode() + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError("the router did not start: see its output above")
        yield StandaloneRouter(process, **json.loads(line))
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 10.0)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _serve(given: dict[str, Any]) -> None:
    configure_grpc()  # must run before gRPC is imported
    from penstock.router.server import serve_router

    workers = given.pop("workers")
    ports = {"http_port": 0, "grpc_port": 0}
    if "hash_key" in given:
        given["hash_key"] = bytes.fromhex(given["hash_key"])
    given["api_keys"] = tuple(ApiKey(**key) for key in given.get("api_keys", ()))
    config = RouterConfig(
        **{**ports, "served_name": "stub", **given, "model": Path(given["model"])}
    )
    router = await serve_router(config)
    await router.set_workers(workers)
    addresses = {
        "http": router.http_address,
        "grpc": router.grpc_address,
        "admin": router.admin_address,
    }
    print(json.dumps(addresses), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await router.stop()


def main() -> int:
    """Run the router until stdin is closed."""
    given = json.loads(sys.stdin.readline())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
