"""The set of worker links of a router."""

import asyncio

from penstock.router.worker_links.links import WorkerLinks
from penstock.router.worker_links.worker_link import RouterIdentity


async def test_last_of_several_concurrent_updates_decides() -> None:
    links = WorkerLinks(RouterIdentity("router-7", "fresh", None), lambda event: None)
    await links.set_workers({"a": "127.0.0.1:1", "b": "127.0.0.1:2"})
    await asyncio.sleep(0)
    newest = {"a": "127.0.0.1:3", "b": "127.0.0.1:4"}
    # First worker a restarts, then worker b, before the router has closed the link to a.
    await asyncio.gather(
        links.set_workers({"a": "127.0.0.1:3", "b": "127.0.0.1:2"}), links.set_workers(newest)
    )
    assert {link.worker: link.address for link in links.all_links()} == newest
    await links.set_workers({})
