"""Checks that routers know exactly the blocks that workers have cached."""

from penstock.common.block_hash import short_hashes
from penstock.loadtests.simulator.world.router import Router
from penstock.loadtests.simulator.world.worker import Worker


def check_index(router: Router, worker: Worker) -> None:
    """Raise AssertionError unless the router's index has exactly the worker's cached blocks."""
    name, index = worker.info.worker, router.dispatcher.prefix_index
    published = short_hashes(worker.batcher.pool.published.hashes())
    assert router.dispatcher.cache_feed.is_current(name), (
        f"router {router.name} has no current list of the blocks that worker {name} caches"
    )
    num = index.num_blocks(name)
    assert num == len(published), (
        f"router {router.name} lists {num} cached blocks of worker {name}, but the worker "
        f"published {len(published)}"
    )
    unknown = [digest for digest in published if name not in index.match((digest,))]
    assert not unknown, (
        f"router {router.name} does not list {len(unknown)} blocks that worker {name} has cached"
    )
