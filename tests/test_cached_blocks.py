"""Two routers know the cached blocks of two workers with models."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import pytest_asyncio

from penstock.common.block_hash import root_hash, short_hashes, short_prefix_hashes
from penstock.router.config import RouterConfig
from penstock.router.server import RunningRouter, serve_router
from penstock.workers.config import WorkerConfig
from penstock.workers.service.grpc_service import RunningWorker, serve_worker
from tests.support.checkpoints import make_checkpoint
from tests.support.served_router import until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

KEY = bytes(range(32))
NUM_PROMPTS = 80  # so many that their blocks exceed the caches of both workers
PROMPT = [5 + (7 * i) % 290 for i in range(70)]


@dataclass
class Cluster:
    folder: Path
    workers: Mapping[str, RunningWorker]
    routers: list[RunningRouter]
    stack: AsyncExitStack

    async def start_router(self) -> RunningRouter:
        """Start a router, and wait until it knows all blocks of the workers."""
        name = f"r{len(self.routers)}"
        config = RouterConfig(self.folder, "m", name=name, http_port=0, grpc_port=0, hash_key=KEY)
        router = await serve_router(config)
        self.stack.push_async_callback(router.stop)
        await router.set_workers({name: each.address for name, each in self.workers.items()})
        self.routers.append(router)
        await until(lambda: self.knows_all(router))
        return router

    def knows_all(self, router: RunningRouter) -> bool:
        """Return whether the router's index has exactly the published blocks of each worker."""
        index = router.frontend._dispatcher.prefix_index
        for name, worker in self.workers.items():
            published = short_hashes(
                worker._manager._engine._engine.batcher.pool.published.hashes()
            )
            if index.num_blocks(name) != len(published):
                return False
            if not all(name in index.match((digest,)) for digest in published):
                return False
        return True


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "llama3")
    async with AsyncExitStack() as stack:
        workers = {}
        for name, role in (("m0", "mixed"), ("m1", "mixed")):
            config = WorkerConfig(name, folder, role=role, kv_cache_mib=2, hash_key=KEY)
            workers[name] = await serve_worker(config)
            stack.push_async_callback(workers[name].stop)
        cluster = Cluster(folder, workers, [], stack)
        await cluster.start_router()
        yield cluster


async def complete(router: RunningRouter, prompt: list[int], **other: str) -> None:
    body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, **other}
    async with httpx.AsyncClient(base_url=f"http://{router.http_address}", timeout=60) as http:
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text


def matches(router: RunningRouter, prompt: list[int]) -> Mapping[str, int]:
    index = router.frontend._dispatcher.prefix_index
    return index.match(short_prefix_hashes(root_hash(KEY, b""), np.array(prompt, np.int32), 16))


async def test_cached_blocks_are_known_by_the_hashes_that_routers_compute(
    cluster: Cluster,
) -> None:
    first = cluster.routers[0]
    await complete(first, PROMPT)
    await until(lambda: cluster.knows_all(first))
    assert max(matches(first, PROMPT).values()) == 4
    assert max(matches(first, PROMPT[:32] + [9] * 32).values()) == 2
    other = PROMPT[::-1]
    await complete(first, other, cache_salt="own")
    await until(lambda: cluster.knows_all(first))
    assert matches(first, other) == {}


async def test_later_routers_know_the_same(cluster: Cluster) -> None:
    second = await cluster.start_router()
    assert matches(second, PROMPT) == matches(cluster.routers[0], PROMPT) != {}
    other = PROMPT[1:]
    await complete(second, other)
    for router in cluster.routers:
        await until(lambda router=router: cluster.knows_all(router))  # type: ignore[misc]
        assert max(matches(router, other).values()) == 4


async def test_evicted_blocks_are_forgotten_by_all_routers(cluster: Cluster) -> None:
    first = cluster.routers[0]
    for number in range(NUM_PROMPTS):
        await complete(first, [5 + (11 * i + number) % 290 for i in range(160)])
    for router in cluster.routers:
        await until(lambda router=router: cluster.knows_all(router))  # type: ignore[misc]
        assert matches(router, PROMPT) == {}
