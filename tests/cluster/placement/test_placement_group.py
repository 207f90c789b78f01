"""A worker's place: waited for, near the others for a while and then anywhere, and waited for again
when its node dies."""

import asyncio
from typing import Any

import pytest

from penstock.cluster.placement import placement_group
from penstock.cluster.placement.placement import PlacementError, WorkerPlacement
from penstock.cluster.placement.placement_group import Reservation
from penstock.cluster.status.status_events import Progress, StatusEvent

ZONE = "ray.io/availability-zone"
ANYWHERE: dict[str, str] = {}


class FakeRay:
    """Grants a group that is looked at often enough, but for the selectors in `full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: int = 1) -> None:
        self.looks = looks
        self.full: list[dict[str, str]] = []
        self.asked: list[dict[str, str]] = []
        self.removed: list[dict[str, str]] = []
        self.said: list[str] = []
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
        self.asked.append(selectors[0])
        return FakeGroup(self, selectors[0])

    def report(self, title: str, notice: StatusEvent) -> None:
        assert title == "decode worker 0"
        assert isinstance(notice, Progress)
        self.said.append(notice.stage)


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


async def test_a_long_wait_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, looks=3)
    monkeypatch.setattr(placement_group, "EXPLAIN_WAIT_SECONDS", 1)
    monkeypatch.setattr(placement_group, "PLACEMENT_TIMEOUT_SECONDS", 2)
    await Reservation(worker(), ray.report).acquire(wait_for_node=True)
    assert ray.asked == [ANYWHERE]
    assert ray.said == [
        "waiting for its place",
        "waiting for its place: no node has CPU 1, decode 1 free",
    ]


async def test_what_is_not_granted_is_refused_where_nobody_is_patient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(monkeypatch, looks=3)
    monkeypatch.setattr(placement_group, "PLACEMENT_TIMEOUT_SECONDS", 2)
    place = worker(labels={"disk": "ssd"})
    with pytest.raises(PlacementError) as refusal:
        await Reservation(place, ray.report).acquire(wait_for_node=False)
    assert str(refusal.value) == (
        "Ray has no room for decode worker 0: no node with disk=ssd has CPU 1, decode 1; "
        "free are no nodes at all"
    )


async def test_where_there_is_no_room_near_any_node_will_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(monkeypatch)
    monkeypatch.setattr(placement_group, "SECONDS_NEAR", 2)
    near = {ZONE: "a", "disk": "ssd"}
    ray.full = [near]
    found = Reservation(worker(labels={"disk": "ssd"}, near={ZONE: "a"}), ray.report)
    await found.acquire(wait_for_node=False)
    assert ray.asked == [near, {"disk": "ssd"}]
    assert ray.removed == [near], "what is asked for no more would be held for nobody"
    assert ray.said == ["waiting for its place", "no room near the others: any node will do"]


async def test_a_place_that_is_there_is_not_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(monkeypatch)
    found = Reservation(worker(near={ZONE: "a"}), ray.report)
    for _ in range(3):
        await found.acquire(wait_for_node=True)
    assert (ray.asked, ray.removed) == ([{ZONE: "a"}], [])
    assert ray.said == ["waiting for its place"]


async def test_a_place_whose_node_died_is_waited_for_near_and_then_anywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(monkeypatch)
    monkeypatch.setattr(placement_group, "SECONDS_NEAR", 2)
    found = Reservation(worker(near={ZONE: "a"}), ray.report)
    await found.acquire(wait_for_node=True)
    ray.full = [{ZONE: "a"}]
    await found.acquire(wait_for_node=True)
    assert ray.asked == [{ZONE: "a"}, ANYWHERE]
    assert ray.said[1:] == [
        "waiting for its place again",
        "no room near the others: any node will do",
    ]
    ray.full = [ANYWHERE]
    waiting = asyncio.create_task(found.acquire(wait_for_node=True))
    while ray.said[-1] != "waiting for its place again":
        await asyncio.sleep(0)
    ray.full = []
    await waiting
    assert len(ray.asked) == 2, "what was asked of any node is Ray's to lay anew"
