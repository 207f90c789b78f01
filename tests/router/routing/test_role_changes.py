"""A worker gets another role while it runs: what is there goes on, what comes follows the role."""

from random import Random

from penstock.common.sampling_params import SamplingParams
from penstock.router.routing.dispatcher import DispatcherLimits
from penstock.router.routing.events import (
    Draining,
    Finish,
    Ready,
    Received,
    Rejected,
    Request,
    RoleChanged,
    Send,
    Status,
    Submit,
    WorkerLost,
    WorkerUp,
    Yield,
    Yielded,
)
from tests.support.router_harness import AT, D, E, M, P, Router, ends, submits
from tests.support.router_world import World, info_of


def running_at(worker: str, router: Router) -> None:
    """Request 1 generates there."""
    assert submits(router.arrive()) == [(worker, 1, 1)]
    router.step(worker, 1, 0)


def role(router: Router, worker: str) -> str:
    return next(each.role for each in router.dispatcher.workers() if each.worker == worker)


def test_what_a_worker_generates_moves_away_when_it_is_to_prefill() -> None:
    router = Router(D)
    running_at("d", router)
    router(WorkerUp(E))
    assert submits(router(RoleChanged("d", "prefill"))) == [("e", 1, 2)], "asked first"
    assert router(Ready("e", 1, 2, 4, 0, AT)) == [Yield("d", 1, 1)]
    assert submits(router(Yielded("d", 1, 1, 3)))[-1] == ("e", 1, 3)
    assert router(Ready("e", 1, 3, 5, 0, AT)) == [Send("d", 1, 1, AT, 3, 5, 0)]
    router(Received("e", 1, 3, 5))
    assert role(router, "d") == "prefill"
    placed = router.arrive(2)
    assert submits(placed) == [("d", 2, 1)]
    router.step("d", 1, 0, number=2)
    assert submits(router(Yielded("d", 2, 1, 3))) == [("e", 2, 2)], "what is new follows the role"


def test_prompts_that_pass_through_are_left_alone() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0)
    assert router(RoleChanged("p", "prefill")) == []
    assert router(RoleChanged("p", "decode")) == []
    assert submits(router(Yielded("p", 1, 1, 3))) == [("d", 1, 2)]


def test_what_cannot_take_its_blocks_along_ends_where_it_is() -> None:
    router = Router(D)
    router.arrive(num_choices=2)
    router.step("d", 1, 0)
    router(WorkerUp(E))
    assert router(RoleChanged("d", "prefill")) == []
    router = Router(D)
    running_at("d", router)
    router(WorkerUp(info_of("e", "decode", layout="other")))
    assert router(RoleChanged("d", "prefill")) == []
    assert router.wait(1, "d", "e") == []


def test_it_waits_for_its_first_token_and_for_somebody_to_take_it() -> None:
    router = Router(D)
    router.arrive()
    assert router(RoleChanged("d", "prefill")) == []
    router.step("d", 1, 0)
    assert router.wait(1, "d") == [], "where nobody decodes a prefill worker does it all"
    assert submits(router(WorkerUp(E)) + router.wait(0.5, "d", "e")) == [("e", 1, 2)]
    assert router(Rejected("e", 1, 2, "full")) == []
    assert submits(router.wait(3, "d", "e")) == [("e", 1, 3)], "asked again later"
    assert ends(router.step("d", 1, 1, Finish.STOP)) == [(1, Status.OK)]


def test_what_was_meant_for_it_goes_elsewhere() -> None:
    router = Router(P, D, E)
    router.arrive()
    router(RoleChanged("d", "prefill"))
    router.step("p", 1, 0)
    assert submits(router(Yielded("p", 1, 1, 3))) == [("e", 1, 2)]


def test_what_waits_there_is_taken_back_and_what_arrives_goes_on() -> None:
    router = Router(P, D, E)
    router.arrive()
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    assert submits(router(RoleChanged("d", "prefill"))) == [("e", 1, 3)]
    router(Ready("e", 1, 3, 4, 0, AT))
    assert router(RoleChanged("e", "prefill")) == [], "its blocks are on their way"
    router(Received("e", 1, 3, 4))
    router.step("e", 3, 1)
    assert router.wait(1, "p", "d", "e") == [], "nobody decodes"
    router(RoleChanged("d", "decode"))
    assert submits(router.wait(0.5, "p", "d", "e")) == [("d", 1, 4)]


def test_a_drain_ends_where_only_prefill_workers_are_left_and_nothing_goes_to_and_fro() -> None:
    router = Router(D, E)
    running_at("d", router)
    router(RoleChanged("e", "prefill"))
    assert submits(router(Draining("d"))) == [("e", 1, 2)]
    assert router.wait(3, "d", "e") == []


def test_a_role_is_kept_by_whoever_follows_under_the_name() -> None:
    router = Router(P, D)
    router(RoleChanged("d", "mixed"))
    router(RoleChanged("x", "prefill"))  # yet to come
    router(WorkerLost("d"))
    router(WorkerUp(info_of("d", "decode", incarnation="2")))
    router(WorkerUp(info_of("x", "decode")))
    assert (role(router, "d"), role(router, "x")) == ("mixed", "prefill")
    assert dict(router.dispatcher.roles) == {"d": "mixed", "x": "prefill"}
    router(RoleChanged("x", "decode"))
    assert role(router, "x") == "decode"


def test_a_mixed_worker_that_decodes_gets_no_prompt() -> None:
    router = Router(M, P)
    router(RoleChanged("m", "decode"))
    router.arrive()
    router.step("p", 1, 0)
    assert submits(router(Yielded("p", 1, 1, 3))) == [("m", 1, 2)]


def test_under_load_all_roles_swap_and_no_prompt_is_computed_elsewhere_again() -> None:
    """Prefill and decode workers change places again and again, without faults."""
    rng = Random(2)
    infos = [info_of(f"w{at}", role, num_blocks=512) for at, role in enumerate(["prefill"] * 2)]
    infos += [info_of(f"w{at + 2}", role, num_blocks=512) for at, role in enumerate(["decode"] * 2)]
    world = World(infos, DispatcherLimits())
    for number in range(60):
        world.arrive(Request(number, [number] * 9, SamplingParams(), max_tokens=12), {})
        for _ in range(rng.randint(0, 12)):
            if moves := world.moves():
                rng.choice(moves)()
        if number % 10 == 9:
            swap = ["prefill", "decode"] if number % 20 == 9 else ["decode", "prefill"]
            for worker in world.workers:
                first = worker in ("w0", "w1")
                world.tell(RoleChanged(worker, swap[1] if first else swap[0]))
    world.settle(rng)
    world.check_rest()
    assert all(client.ended.status is Status.OK for client in world.clients.values())  # type: ignore[union-attr]
    assert world.dispatcher.counters.num_transfers > 20
    assert world.dispatcher.counters.num_transfers_failed == 0
    had: dict[int, set[str]] = {}
    for _, _, commands in world.history:
        for submit in commands:
            if isinstance(submit, Submit):
                workers = had.setdefault(submit.request.id, set())
                # Without a source only where its blocks are, and serve as prefix cache.
                assert not workers or submit.source or submit.worker in workers
                workers.add(submit.worker)
