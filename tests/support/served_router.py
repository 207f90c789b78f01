"""A router that serves on loopback, with stub workers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from penstock.router.config import RouterConfig
from penstock.router.helpers.fork_server import ForkServer
from penstock.router.server import RunningRouter, serve_router
from tests.support.stub_worker import StubWorker
from tests.support.tokenizers import byte_level, write_folder

FORK_SERVER = ForkServer()
"""The fork server, which all tests of a process share, because it takes 0.3 s to start."""

ADMIN_PATHS = ("/metrics", "/status", "/steps", "/role", "/drain")

TIMEOUT_SECONDS = 120.0
"""Timeout of a wait in a test, in seconds; no wait is expected to take that long."""


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Wait until a condition is true; raise AssertionError after `TIMEOUT_SECONDS` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not condition():
                await asyncio.sleep(0.002)
    assert condition(), what or "the condition never came true"


def model_folder(parent: Path) -> Path:
    """Write a model folder for routers: byte-level tokenizer, chat template, context of 2048."""
    return write_folder(parent / "model", byte_level())


@dataclass(frozen=True)
class Served:
    router: RunningRouter
    workers: Sequence[StubWorker]

    @property
    def url(self) -> str:
        return f"http://{self.router.http_address}"

    @property
    def admin_url(self) -> str:
        return f"http://{self.router.admin_address}"

    @property
    def worker(self) -> StubWorker:
        """The router's only worker."""
        (worker,) = self.workers
        return worker


class ByPath(httpx.AsyncHTTPTransport):
    """Sends requests for operators' paths to the operators' port, others to the port of the URL."""

    def __init__(self, served: Served) -> None:
        super().__init__()
        self._admin_port = int(served.admin_url.rpartition(":")[2])

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path in ADMIN_PATHS:
            request.url = request.url.copy_with(port=self._admin_port)
        return await super().handle_async_request(request)


def client_of(served: Served, key: str = "") -> httpx.AsyncClient:
    """Return a client of both HTTP ports that sends this API key."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(
        base_url=served.url, timeout=30, headers=headers, transport=ByPath(served)
    )


@contextlib.asynccontextmanager
async def serving(config: RouterConfig, *workers: StubWorker) -> AsyncIterator[Served]:
    """Run a router on free ports; yield once it has a stream to each of `workers`."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        config = replace(config, http_port=0, grpc_port=0, admin_port=0)
        router = await serve_router(config, FORK_SERVER)
        stack.push_async_callback(router.stop)
        await router.set_workers({worker.name: worker.address for worker in workers})
        views = router.frontend.workers
        await until(lambda: len(views()) == len(workers), "no stream to some worker")
        yield Served(router, workers)
