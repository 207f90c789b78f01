"""Reservation of a worker's placement group.

The reservation waits for resources, falls back from nodes near each other to any nodes, and waits
again after a node was lost.
"""

import asyncio
from typing import Any

import pytest

from penstock.cluster.placement import placement_group
from penstock.cluster.placement.placement_group import Reservation
from penstock.cluster.placement.placement_plan import PlacementError, WorkerPlacement
from penstock.cluster.status.status_events import Progress, StatusEvent

ZONE = "ray.io/availability-zone"
ANYWHERE: dict[str, str] = {}


class FakeRay:
    """A fake Ray.

    A group counts as placed from the `looks`-th check on, but never if its selector is in `full`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: int = 1) -> None:
        self.looks = looks
        self.full: list[dict[str, str]] = []
        self.requested: list[dict[str, str]] = []
        self.removed: list[dict[str, str]] = []
        self.stages: list[str] = []
        monkeypatch.setattr(placement_group, "placement_group", self.make)
        monkeypatch.setattr(
            placement_group,
            "remove_placement_group",
            lambda group: self.removed.append(group.selector),
        )
        monkeypatch.setattr(placement_group, "placement_group_table", FakeGroup.table)
        monkeypatch.setattr(placement_group, "free_nodes", lambda: [])

    def make(
        self, bundles: list[Any], strategy: str, bundle_label_selector: list[dict[str, str]] | None
    ) -> "FakeGroup":
        selectors = bundle_label_selector or [ANYWHERE] * len(bundles)
        assert len(selectors) == len(bundles)
        assert all(each == selectors[0] for each in selectors)
        self.requested.append(selectors[0])
        return FakeGroup(self, selectors[0])

    def report(self, title: str, notice: StatusEvent) -> None:
        assert title == "decode worker 0"
        assert isinstance(notice, Progress)
        self.stages.append(notice.stage)


class FakeGroup:
    def __init__(self, ray: FakeRay, selector: dict[str, str]) -> None:
        self.ray, self.selector = ray, selector
        self.looks = 0

    def wait(self, seconds: float) -> bool:
        self.looks += 1
        return self.looks >= self.ray.looks and self.selector not in self.ray.full

    def table(self) -> dict[str, Any]:
        return {"state": "RESCHEDULING" if self.selector in self.ray.full else "CREATED"}


def worker(**fields: Any) -> WorkerPlacement:
    return WorkerPlacement("decode", 0, ({"CPU": 1.0, "decode": 1.0},) * 2, 1, 0, 1.0, **fields)


async def test_long_wait_reports_the_missing_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, looks=3)
    monkeypatch.setattr(placement_group, "EXPLAIN_WAIT_SECONDS", 1)
    monkeypatch.setattr(placement_group, "PLACEMENT_TIMEOUT_SECONDS", 2)
    await Reservation(worker(), ray.report).acquire(wait_for_node=True)
    assert ray.requested == [ANYWHERE]
    assert ray.stages == [
        "waiting for resources",
        "waiting for resources: no node has CPU 1, decode 1 free",
    ]


async def test_placement_that_does_not_wait_for_nodes_fails_after_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(monkeypatch, looks=3)
    monkeypatch.setattr(placement_group, "PLACEMENT_TIMEOUT_SECONDS", 2)
    placement = worker(labels={"disk": "ssd"})
    with pytest.raises(PlacementError) as refusal:
        await Reservation(placement, ray.report).acquire(wait_for_node=False)
    assert str(refusal.value) == (
        "Ray has no room for decode worker 0: no node with disk=ssd has CPU 1, decode 1; "
        "free resources: none, there are no nodes"
    )


async def test_without_room_near_other_workers_any_node_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(monkeypatch)
    monkeypatch.setattr(placement_group, "SECONDS_NEAR", 2)
    near = {ZONE: "a", "disk": "ssd"}
    ray.full = [near]
    reservation = Reservation(worker(labels={"disk": "ssd"}, near={ZONE: "a"}), ray.report)
    await reservation.acquire(wait_for_node=False)
    assert ray.requested == [near, {"disk": "ssd"}]
    assert ray.removed == [near], "an abandoned group would hold its resources"
    assert ray.stages == [
        "waiting for resources",
        "no room near the other workers: accepting any node",
    ]


async def test_existing_placement_is_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(monkeypatch)
    reservation = Reservation(worker(near={ZONE: "a"}), ray.report)
    for _ in range(3):
        await reservation.acquire(wait_for_node=True)
    assert (ray.requested, ray.removed) == ([{ZONE: "a"}], [])
    assert ray.stages == ["waiting for resources"]


async def test_after_a_lost_node_placement_is_tried_near_and_then_anywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(monkeypatch)
    monkeypatch.setattr(placement_group, "SECONDS_NEAR", 2)
    reservation = Reservation(worker(near={ZONE: "a"}), ray.report)
    await reservation.acquire(wait_for_node=True)
    ray.full = [{ZONE: "a"}]
    await reservation.acquire(wait_for_node=True)
    assert ray.requested == [{ZONE: "a"}, ANYWHERE]
    assert ray.stages[1:] == [
        "waiting for resources again",
        "no room near the other workers: accepting any node",
    ]
    ray.full = [ANYWHERE]
    waiting = asyncio.create_task(reservation.acquire(wait_for_node=True))
    while ray.stages[-1] != "waiting for resources again":
        await asyncio.sleep(0)
    ray.full = []
    await waiting
    assert len(ray.requested) == 2, "Ray itself reschedules a group that accepts any node"
