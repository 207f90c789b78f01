"""A router and a worker in this process, which serve the small bundled model."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from penstock.router.config import RouterConfig
from penstock.workers.config import WorkerConfig
from penstock.workers.service.grpc_service import serve_worker
from tests.support.served_router import Served, serving, until

FOLDER = Path(__file__).parents[2] / "penstock" / "models" / "demo-small"


@contextlib.asynccontextmanager
async def serving_demo(router_folder: Path = FOLDER) -> AsyncIterator[Served]:
    """Serve the model; the router reads tokenizer and chat template from `router_folder`."""
    worker = await serve_worker(WorkerConfig("w0", FOLDER, kv_cache_mib=8))
    async with serving(RouterConfig(router_folder, "demo")) as served:
        await served.router.frontend.set_workers({"w0": worker.address})
        await until(lambda: not served.router.frontend.why_not_ready())
        yield served
    await worker.stop()
