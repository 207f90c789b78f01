"""`ManagedWorker` with fake processes: it kills a worker whose node is lost during the start."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.cluster.placement.placement_group import Reservation
from penstock.cluster.placement.placement_plan import WorkerPlacement
from penstock.cluster.pools import managed_worker
from penstock.cluster.pools.managed_router import ManagedRouter
from penstock.cluster.pools.managed_worker import ManagedWorker
from penstock.router.config import RouterConfig
from penstock.workers.config import WorkerConfig


class FakeReservation:
    """A fake reservation of a placement group; the group is lost if `exists` is False."""

    def __init__(self) -> None:
        self.exists = True

    async def is_lost(self) -> bool:
        await asyncio.sleep(0)
        return not self.exists


@pytest.mark.parametrize("serves", [False, True])
async def test_worker_whose_node_is_lost_while_it_starts_is_killed(
    monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    monkeypatch.setattr(managed_worker, "PLACEMENT_CHECK_SECONDS", 0.0)
    placement = WorkerPlacement("decode", 0, ({"CPU": 1.0},), 1, 0, 1.0)
    config = RouterConfig(model=Path("model"), served_name="m")
    router = ManagedRouter(config, lambda title, notice: None)
    worker = ManagedWorker(
        placement, WorkerConfig("decode-0", Path("m")), router, lambda t, n: None
    )
    reservation, killed = FakeReservation(), asyncio.Event()
    worker._reservation = cast(Reservation, reservation)
    rank_group = SimpleNamespace(declare_dead=None, kill=killed.set)
    monkeypatch.setattr(managed_worker, "RankGroup", lambda members: rank_group)
    monkeypatch.setattr(worker, "_make_rank", lambda rank: None)
    worker.make()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not killed.is_set()
    if serves:
        await worker.on_ready("here:1")
    reservation.exists = False
    if serves:  # The death of a serving worker is detected by other code.
        for _ in range(100):
            await asyncio.sleep(0)
        assert not killed.is_set()
    else:
        async with asyncio.timeout(60):
            await killed.wait()
    await worker.on_exit()
