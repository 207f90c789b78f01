import pytest

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.events import WorkerInfo
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.policy import LeastLoaded, Placement
from penstock.router.routing.worker_view import ResourceUsage, WorkerView
from tests.support.router_world import info_of

FRESH = Demand(1, num_tokens=10, num_sequences=1, num_remaining=8)
LONG_AGO = float("-inf")


def view(
    name: str, role: str, queued_tokens: int = 0, running: int = 0, layout: str = "L"
) -> WorkerView:
    load = WorkerLoad(queued_tokens=queued_tokens, running=running)
    return WorkerView(info_of(name, role, layout=layout), load, 0.0, LONG_AGO)


def place(*views: WorkerView, demand: Demand = FRESH) -> Placement | None:
    return LeastLoaded().choose(demand, views, TransferCostModel(), now=100.0)


def test_separate_pools_use_a_prefill_and_a_decode_worker() -> None:
    placement = place(
        view("p0", "prefill", queued_tokens=50),
        view("p1", "prefill", queued_tokens=10),
        view("d0", "decode", running=1),
        view("d1", "decode"),
    )
    assert placement == Placement("p1", "d1")
    assert placement.yield_after == 1


def test_prefill_worker_must_have_the_kv_layout_of_the_decode_worker() -> None:
    """Workers of different KV layouts cannot exchange blocks, so the prefill would be repeated."""
    prefill = view("p0", "prefill", layout="narrow")
    idle, busy = view("d0", "decode"), view("d1", "decode", running=1, layout="narrow")
    assert place(prefill, idle, busy) == Placement("p0", "d1")
    assert place(prefill, idle) == Placement("d0")
    assert place(prefill, idle, unusable("full", busy)) == Placement("d0")


def test_mixed_worker_prefills_and_decodes() -> None:
    placement = place(view("m0", "mixed", running=2), view("m1", "mixed"))
    assert placement == Placement("m1")
    assert placement.yield_after == 0


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_workers_of_any_single_role_serve_requests(role: str) -> None:
    assert place(view("only", role)) == Placement("only")


@pytest.mark.parametrize(
    ("demand", "worker"),
    [
        # The prefill worker generates the only token itself.
        (Demand(1, 10, 1, num_remaining=1), "p0"),
        # A request with several choices stays on one worker.
        (Demand(1, 10, 3, num_remaining=8, is_pinned=True), "d0"),
        (Demand(1, 10, 1, num_remaining=8, has_source=True), "d0"),
    ],
)
def test_some_requests_stay_on_one_worker(demand: Demand, worker: str) -> None:
    views = view("p0", "prefill"), view("d0", "decode")
    assert place(*views, demand=demand) == Placement(worker)


def unusable(kind: str, target: WorkerView) -> WorkerView:
    if kind == "suspect":
        target.suspect = True
    elif kind == "draining":
        target.draining = True
    elif kind == "masked":
        target.backed_off_at = 99.0
    else:
        target.set_usage(9, ResourceUsage(target.info.max_sequences, 1))
    return target


KINDS = ["suspect", "draining", "masked", "full"]


@pytest.mark.parametrize("kind", KINDS)
def test_unavailable_worker_is_not_chosen(kind: str) -> None:
    unavailable = unusable(kind, view("m0", "mixed"))
    assert place(unavailable, view("m1", "mixed", queued_tokens=10**6, running=2)) == Placement(
        "m1"
    )
    assert place(unavailable) is None


@pytest.mark.parametrize("kind", KINDS)
def test_full_pool_is_waited_for_and_an_unusable_one_is_not(kind: str) -> None:
    waits = kind in ("masked", "full")
    decode = unusable(kind, view("d0", "decode"))
    assert place(view("p0", "prefill"), decode) == (None if waits else Placement("p0"))
    prefill = unusable(kind, view("p0", "prefill"))
    assert place(prefill, view("d0", "decode")) == (None if waits else Placement("d0"))


def test_unfit_workers_are_not_chosen() -> None:
    demand = Demand(1, 10, 1, 8, unfit_workers={"m0"})
    assert place(view("m0", "mixed"), view("m1", "mixed", running=3), demand=demand) == Placement(
        "m1"
    )


def test_requests_placed_since_the_last_report_count() -> None:
    first, second = view("p0", "prefill"), view("p1", "prefill", queued_tokens=5)
    first.set_usage(1, first.resource_usage(10, 1), 10)
    assert place(first, second, view("d0", "decode")) == Placement("p1", "d0")
    first.update_load(WorkerLoad(queued_tokens=4), 0.0)
    assert place(first, second, view("d0", "decode")) == Placement("p0", "d0")


def test_idle_workers_are_chosen_in_rotation() -> None:
    views = [view(f"m{number}", "mixed") for number in range(3)]
    chosen = []
    for _ in range(6):
        placement = place(*views)
        assert placement is not None
        chosen.append(placement.worker)
        used = next(each for each in views if each.name == placement.worker)
        used.set_usage(1, used.resource_usage(10, 1), 10)
        used.remove(1)
        used.update_load(WorkerLoad(), 0.0)
    assert chosen == ["m0", "m1", "m2"] * 2


def test_recently_lost_worker_is_penalized_but_not_excluded() -> None:
    back = WorkerView(info_of("m0", "mixed"), WorkerLoad(), 0.0, lost_at=99.0)
    assert place(back, view("m1", "mixed", queued_tokens=500)) == Placement("m1")
    assert place(back) == Placement("m0")
    assert place(back, view("m1", "mixed", queued_tokens=10**6)) == Placement("m0")
    views = [back, view("m1", "mixed", queued_tokens=500)]
    later = LeastLoaded().choose(FRESH, views, TransferCostModel(), 200.0)
    assert later == Placement("m0")


def test_capacity_is_limited_in_sequences_and_blocks() -> None:
    info: WorkerInfo = info_of("m0", "mixed", max_sequences=3, num_blocks=8, block_size=4)
    worker = WorkerView(info, WorkerLoad(), 0.0, LONG_AGO)
    # An idle worker has room for any request; it rejects a request that can never fit.
    assert worker.has_capacity(10_000, 1)
    worker.set_usage(1, worker.resource_usage(11, 1))
    assert worker.num_blocks == 3
    assert worker.has_capacity(19, 1)
    assert not worker.has_capacity(20, 1)
    assert worker.has_capacity(4, 2)
    assert not worker.has_capacity(4, 3)
    worker.set_usage(2, None)  # None: the worker only keeps a lease, which uses no capacity
    assert worker.has_capacity(19, 1)
    worker.remove(1)
    assert worker.has_capacity(10_000, 1)
