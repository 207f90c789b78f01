import pytest

from penstock.router.routing.events import (
    Draining,
    Drop,
    Finish,
    Ready,
    Received,
    Rejected,
    Send,
    Status,
    Submit,
    WorkerUp,
    Yield,
    Yielded,
)
from penstock.router.routing.placement.placer import RecoveryThrottle
from tests.support.router_harness import AT, D, E, M, N, P, Router, ends, submits
from tests.support.router_world import info_of

# ------------------------------------------------------------------ pace


def test_so_many_recover_at_once_as_there_are_workers_for() -> None:
    pace = RecoveryThrottle(2)
    for request in range(6):
        pace.add(request)
    assert pace.release(0) == []
    assert pace.release(1) == [0, 1]
    assert pace.release(1) == []
    assert pace.release(2) == [2, 3]
    assert len(pace) == 2
    assert 4 in pace
    pace.discard(0)  # it has a token again
    assert pace.release(2) == [4]


def test_lost_again_while_it_recovers_it_takes_no_place() -> None:
    pace = RecoveryThrottle(1)
    pace.add(1)
    assert pace.release(1) == [1]
    pace.add(1)
    pace.add(2)
    assert pace.release(1) == [1]
    pace.discard(1)
    assert pace.release(1) == [2]


def test_what_ends_while_it_is_held_back_is_forgotten() -> None:
    pace = RecoveryThrottle(1)
    pace.add(1)
    pace.discard(1)
    assert pace.release(1) == []


# ------------------------------------------------------------------ waiting


def test_a_line_is_short_of_the_roles_that_have_no_room() -> None:
    router = Router()
    assert set(router.dispatcher.short_of) == set(), "nothing waits"
    router.arrive(1)
    assert set(router.dispatcher.short_of) == {"prefill", "decode", "mixed"}
    router = Router(P, D)
    router(Draining("d"))
    router(Draining("p"))
    router.arrive(1)
    router(WorkerUp(P))
    assert set(router.dispatcher.short_of) == set(), "it has gone to the one that came"
    router = Router(P, info_of("d", "decode", max_sequences=1))
    router.arrive(1)
    router.arrive(2)
    assert set(router.dispatcher.short_of) == {"decode", "mixed"}


# ------------------------------------------------------------------ draining


def test_a_drained_worker_gets_nothing_new_and_hands_on_what_runs() -> None:
    router = Router(D)
    router.arrive(1)
    router.step("d", 1, 0)
    assert router(Draining("d")) == []  # nobody else is there: it runs on
    assert router.state("d") == "draining"
    commands = router(WorkerUp(E)) + router.wait(0.5, "d", "e")
    assert submits(commands) == [("e", 1, 2)]
    assert router.wait(1, "d", "e") == []  # asked once
    assert router(Ready("e", 1, 2, 4, 0, AT)) == [Yield("d", 1, 1)]
    commands = router(Yielded("d", 1, 1, 3))
    assert commands[0] == Drop("e", 1, 2)
    assert submits(commands) == [("e", 1, 3)]
    assert router(Ready("e", 1, 3, 5, 0, AT)) == [Send("d", 1, 1, AT, 3, 5, 0)]
    assert router(Received("e", 1, 3, 5)) == [Drop("d", 1, 1)]
    assert submits(router.arrive(2)) == [("e", 2, 1)]


def test_who_is_asked_and_could_never_take_it_does_not_end_it() -> None:
    router = Router(D)
    router.arrive()
    router.step("d", 1, 0)
    router(WorkerUp(E))
    assert submits(router(Draining("d"))) == [("e", 1, 2)]
    assert router(Rejected("e", 1, 2, "too long", is_permanent=True)) == []
    assert router.wait(1, "d", "e") == []
    assert ends(router.step("d", 1, 1, Finish.STOP)) == [(1, Status.OK)]


def test_what_a_drained_worker_has_not_begun_yields_at_once() -> None:
    router = Router(M)
    router.arrive()
    router(WorkerUp(N))
    assert router(Draining("m")) == [Yield("m", 1, 1)]
    assert submits(router(Yielded("m", 1, 1, 0))) == [("n", 1, 2)]


def test_where_blocks_are_of_no_use_it_yields_at_once() -> None:
    router = Router(M)
    router.arrive()
    router.step("m", 1, 0)
    router(WorkerUp(info_of("n", "mixed", layout="other")))
    assert router(Draining("m")) == [Yield("m", 1, 1)]
    commands = router(Yielded("m", 1, 1, 3))
    assert commands[0] == Drop("m", 1, 1)
    assert submits(commands) == [("n", 1, 2)]


def test_several_choices_move_together_and_are_computed_anew() -> None:
    router = Router(M)
    router.arrive(num_choices=2)
    router.step("m", 1, 0)
    router(WorkerUp(N))
    assert router(Draining("m")) == [Yield("m", 1, 1)]
    (submit,) = router(Yielded("m", 1, 1, 0))
    assert isinstance(submit, Submit)
    assert (submit.worker, submit.log) == ("n", ((50,), ()))


@pytest.mark.parametrize("trouble", ["draining", "suspect"])
def test_what_waits_for_a_worker_in_trouble_is_taken_back(trouble: str) -> None:
    router = Router(P, D, E)
    router.arrive()
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    commands = router(Draining("d")) if trouble == "draining" else router.wait(2.5, "p", "e")
    assert commands[0] == Drop("d", 1, 2)
    assert submits(commands) == [("e", 1, 3)]


def test_blocks_on_their_way_to_a_drained_worker_are_let_arrive() -> None:
    router = Router(P, D, E)
    router.arrive()
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    router(Ready("d", 1, 2, 4, 0, AT))
    assert router(Draining("d")) == []
    assert router(Received("d", 1, 2, 4)) == [Drop("p", 1, 1)]
    router.step("d", 2, 1)
    assert submits(router.wait(0.5, "p", "d", "e")) == [("e", 1, 3)]  # and then on


def test_a_drained_prefill_worker_is_not_meant_for_anything_later() -> None:
    router = Router(P, D, E)
    router.arrive()
    router(Draining("d"))
    router.step("p", 1, 0)
    assert submits(router(Yielded("p", 1, 1, 3))) == [("e", 1, 2)]
