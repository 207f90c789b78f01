"""A running worker changes role: its requests move or finish, and new requests follow the role."""

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


def start_on(worker: str, router: Router) -> None:
    """Place request 1 on `worker`, and deliver the request's first token."""
    assert submits(router.arrive()) == [(worker, 1, 1)]
    router.step(worker, 1, 0)


def role(router: Router, worker: str) -> str:
    return next(each.role for each in router.dispatcher.workers() if each.worker == worker)


def test_decoding_requests_move_when_their_worker_becomes_a_prefill_worker() -> None:
    router = Router(D)
    start_on("d", router)
    router(WorkerUp(E))
    assert submits(router(RoleChanged("d", "prefill"))) == [("e", 1, 2)], (
        "the source runs on until the destination is ready"
    )
    assert router(Ready("e", 1, 2, 4, 0, AT)) == [Yield("d", 1, 1)]
    assert submits(router(Yielded("d", 1, 1, 3)))[-1] == ("e", 1, 3)
    assert router(Ready("e", 1, 3, 5, 0, AT)) == [Send("d", 1, 1, AT, 3, 5, 0)]
    router(Received("e", 1, 3, 5))
    assert role(router, "d") == "prefill"
    placed = router.arrive(2)
    assert submits(placed) == [("d", 2, 1)]
    router.step("d", 1, 0, number=2)
    assert submits(router(Yielded("d", 2, 1, 3))) == [("e", 2, 2)], "new requests follow the role"


def test_role_change_does_not_affect_prompts_in_prefill() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0)
    assert router(RoleChanged("p", "prefill")) == []
    assert router(RoleChanged("p", "decode")) == []
    assert submits(router(Yielded("p", 1, 1, 3))) == [("d", 1, 2)]


def test_request_whose_blocks_cannot_move_finishes_where_it_runs() -> None:
    router = Router(D)
    router.arrive(num_choices=2)
    router.step("d", 1, 0)
    router(WorkerUp(E))
    assert router(RoleChanged("d", "prefill")) == []
    router = Router(D)
    start_on("d", router)
    router(WorkerUp(info_of("e", "decode", layout="other")))
    assert router(RoleChanged("d", "prefill")) == []
    assert router.wait(1, "d", "e") == []


def test_move_waits_for_the_first_token_and_for_a_decode_worker() -> None:
    router = Router(D)
    router.arrive()
    assert router(RoleChanged("d", "prefill")) == []
    router.step("d", 1, 0)
    assert router.wait(1, "d") == [], "without a decode worker the prefill worker also decodes"
    assert submits(router(WorkerUp(E)) + router.wait(0.5, "d", "e")) == [("e", 1, 2)]
    assert router(Rejected("e", 1, 2, "full")) == []
    assert submits(router.wait(3, "d", "e")) == [("e", 1, 3)], "submitted again after the rejection"
    assert ends(router.step("d", 1, 1, Finish.STOP)) == [(1, Status.OK)]


def test_decode_target_that_becomes_a_prefill_worker_is_replaced() -> None:
    router = Router(P, D, E)
    router.arrive()
    router(RoleChanged("d", "prefill"))
    router.step("p", 1, 0)
    assert submits(router(Yielded("p", 1, 1, 3))) == [("e", 1, 2)]


def test_waiting_request_is_withdrawn_and_a_started_transfer_completes() -> None:
    router = Router(P, D, E)
    router.arrive()
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    assert submits(router(RoleChanged("d", "prefill"))) == [("e", 1, 3)]
    router(Ready("e", 1, 3, 4, 0, AT))
    assert router(RoleChanged("e", "prefill")) == [], "its KV transfer is in progress"
    router(Received("e", 1, 3, 4))
    router.step("e", 3, 1)
    assert router.wait(1, "p", "d", "e") == [], "no worker decodes"
    router(RoleChanged("d", "decode"))
    assert submits(router.wait(0.5, "p", "d", "e")) == [("d", 1, 4)]


def test_drain_to_the_only_prefill_worker_moves_each_request_once() -> None:
    router = Router(D, E)
    start_on("d", router)
    router(RoleChanged("e", "prefill"))
    assert submits(router(Draining("d"))) == [("e", 1, 2)]
    assert router.wait(3, "d", "e") == []


def test_assigned_role_applies_to_later_processes_of_the_same_name() -> None:
    router = Router(P, D)
    router(RoleChanged("d", "mixed"))
    router(RoleChanged("x", "prefill"))  # x connects later
    router(WorkerLost("d"))
    router(WorkerUp(info_of("d", "decode", incarnation="2")))
    router(WorkerUp(info_of("x", "decode")))
    assert (role(router, "d"), role(router, "x")) == ("mixed", "prefill")
    assert dict(router.dispatcher.roles) == {"d": "mixed", "x": "prefill"}
    router(RoleChanged("x", "decode"))
    assert role(router, "x") == "decode"


def test_mixed_worker_assigned_to_decode_gets_no_prompts() -> None:
    router = Router(M, P)
    router(RoleChanged("m", "decode"))
    router.arrive()
    router.step("p", 1, 0)
    assert submits(router(Yielded("p", 1, 1, 3))) == [("m", 1, 2)]


def test_no_prompt_is_recomputed_elsewhere_when_roles_swap_under_load() -> None:
    """Swap the roles of the prefill and the decode workers repeatedly, without faults."""
    rng = Random(2)
    infos = [info_of(f"w{at}", role, num_blocks=512) for at, role in enumerate(["prefill"] * 2)]
    infos += [info_of(f"w{at + 2}", role, num_blocks=512) for at, role in enumerate(["decode"] * 2)]
    world = World(infos, DispatcherLimits())
    for number in range(60):
        world.arrive(Request(number, [number] * 9, SamplingParams(), max_tokens=12), {})
        for _ in range(rng.randint(0, 12)):
            if moves := world.possible_actions():
                rng.choice(moves)()
        if number % 10 == 9:
            swap = ["prefill", "decode"] if number % 20 == 9 else ["decode", "prefill"]
            for worker in world.workers:
                first = worker in ("w0", "w1")
                world.handle(RoleChanged(worker, swap[1] if first else swap[0]))
    world.run_until_idle(rng)
    world.check_rest()
    assert all(client.ended.status is Status.OK for client in world.clients.values())  # type: ignore[union-attr]
    assert world.dispatcher.counters.num_transfers > 20
    assert world.dispatcher.counters.num_transfers_failed == 0
    workers_of: dict[int, set[str]] = {}
    for _, _, commands in world.history:
        for submit in commands:
            if isinstance(submit, Submit):
                workers = workers_of.setdefault(submit.request.id, set())
                # A request without a source may go only to workers that have cached its prompt.
                assert not workers or submit.source or submit.worker in workers
                workers.add(submit.worker)
