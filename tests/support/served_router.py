"""A router that serves on loopback, with stub workers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.router.config import RouterConfig
from penstock.router.server import RunningRouter, serve_router
from tests.support.stub_worker import StubWorker
from tests.support.tokenizers import byte_level, write_folder

BOUND = 120.0
"""Timeout of a wait in a test, in seconds; no wait is expected to take that long."""


async def until(holds: Callable[[], object], what: str = "") -> None:
    """Wait until a condition is true; raise AssertionError after `BOUND` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BOUND):
            while not holds():
                await asyncio.sleep(0.002)
    assert holds(), what or "the condition never came true"


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
    def worker(self) -> StubWorker:
        """The router's only worker."""
        (worker,) = self.workers
        return worker


@contextlib.asynccontextmanager
async def serving(config: RouterConfig, *workers: StubWorker) -> AsyncIterator[Served]:
    """Run a router on free ports; it is ready once it has a stream to each given worker."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        router = await serve_router(replace(config, http_port=0, grpc_port=0))
        stack.push_async_callback(router.stop)
        await router.set_workers({worker.name: worker.address for worker in workers})
        views = router.frontend.workers
        await until(lambda: len(views()) == len(workers), "no stream to some worker")
        yield Served(router, workers)
