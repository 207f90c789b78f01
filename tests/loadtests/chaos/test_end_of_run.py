"""The checks after the last fault, on a cluster with a stubbed supervisor."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.loadtests.chaos import __main__ as chaos
from penstock.loadtests.chaos.cluster import Cluster
from penstock.router.observability.snapshot import WorkerState

WORKER = SimpleNamespace(
    name="decode-0",
    serves=True,
    rank_group=SimpleNamespace(ranks=[SimpleNamespace(process=SimpleNamespace(pid=1))]),
)


def listed(state: str = "ready", used: int = 0) -> WorkerState:
    blocks: Any = SimpleNamespace(blocks={"used": used})
    return WorkerState("decode-0", "decode", state, requests=0, numbers=blocks)


def cluster_of(*workers: WorkerState) -> Cluster:
    """Return a cluster of the worker WORKER, whose router lists `workers`."""

    async def snapshot() -> SimpleNamespace:
        return SimpleNamespace(streams=0, workers=workers)

    cluster: Any = Cluster.__new__(Cluster)
    router = SimpleNamespace(snapshot=snapshot)
    cluster._supervisor = SimpleNamespace(workers=[WORKER], router=router)
    cluster._task = SimpleNamespace(done=lambda: False)
    made: Cluster = cluster
    return made


def run_of(cluster: Cluster) -> Any:
    run: Any = chaos.ChaosRun.__new__(chaos.ChaosRun)
    run._cluster = cluster
    return run


@pytest.mark.parametrize(
    ("workers", "is_complete"), [([], False), ([listed("down")], False), ([listed()], True)]
)
async def test_cluster_is_complete_once_the_router_is_connected_to_all_workers(
    workers: list[WorkerState], is_complete: bool
) -> None:
    assert await cluster_of(*workers).wait_until_complete(0.1) is is_complete


@pytest.mark.parametrize(
    ("workers", "left"),
    [
        ([], ["the router does not list decode-0"]),
        ([listed(used=2)], ["decode-0 has 0 requests, blocks {'used': 2}"]),
        ([listed()], []),
    ],
)
async def test_workers_without_an_empty_report_are_named(
    workers: list[WorkerState], left: list[str]
) -> None:
    assert await run_of(cluster_of(*workers))._held() == left


async def test_router_without_workers_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "REST_SECONDS", 0.1)
    left = await run_of(cluster_of())._until_rest()
    assert left == ["not all workers served again within 0.1 s"]
