from collections.abc import Sequence

import pytest

from penstock.router.routing.dispatcher import Dispatcher, Limits
from penstock.router.routing.events import (
    Arrived,
    Command,
    Deliver,
    Draining,
    Drop,
    End,
    Event,
    Failed,
    Finish,
    Gone,
    Hang,
    Heard,
    Load,
    Meeting,
    NewToken,
    Ready,
    Received,
    Rejected,
    Request,
    Send,
    Status,
    Stepped,
    Submit,
    Tick,
    WorkerInfo,
    WorkerLost,
    WorkerUp,
    Yield,
    Yielded,
)
from penstock.router.routing.lifecycle import Phase
from penstock.router.routing.policy import LeastLoaded
from tests.support.router_world import info_of

P, D, E = info_of("p", "prefill"), info_of("d", "decode"), info_of("e", "decode")
M, N = info_of("m", "mixed"), info_of("n", "mixed")
AT = Meeting("d", "1", "address", "secret")


class Router:
    """A dispatcher with a clock; every event is followed by its check."""

    def __init__(self, *infos: WorkerInfo, limits: Limits | None = None) -> None:
        self.dispatcher = Dispatcher(LeastLoaded(), limits)
        self.now = 1000.0
        for info in infos:
            self(WorkerUp(info))

    def __call__(self, event: Event) -> list[Command]:
        commands = self.dispatcher.handle(event, self.now)
        self.dispatcher.check()
        return commands

    def arrive(self, number: int = 1, num_prompt: int = 3, **fields: object) -> list[Command]:
        request = Request(number, [7] * num_prompt, None, **fields)  # type: ignore[arg-type]
        return self(Arrived(request))

    def step(
        self,
        worker: str,
        attempt: int,
        position: int,
        finish: Finish = Finish.NONE,
        number: int = 1,
    ) -> list[Command]:
        token = NewToken(number, attempt, 0, position, 50 + position, finish)
        return self(Stepped(worker, [token]))

    def wait(self, seconds: float, *alive: str) -> list[Command]:
        """Time passes in small ticks, in which only those workers are heard."""
        commands: list[Command] = []
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for worker in alive:
                commands += self(Heard(worker))
            commands += self(Tick())
        return commands

    def state(self, worker: str) -> str:
        return next(w.state for w in self.dispatcher.workers() if w.worker == worker)


def submits(commands: Sequence[Command]) -> list[tuple[str, int, int]]:
    return [(c.worker, c.request.id, c.attempt) for c in commands if isinstance(c, Submit)]


def ends(commands: Sequence[Command]) -> list[tuple[int, Status]]:
    return [(c.request, c.status) for c in commands if isinstance(c, End)]


# ------------------------------------------------------------------ the road


def test_a_request_goes_through_both_pools() -> None:
    router = Router(P, D)
    (submit,) = router.arrive()
    assert isinstance(submit, Submit)
    assert (submit.worker, submit.attempt, submit.yield_after) == ("p", 1, 1)
    assert [type(c) for c in router.step("p", 1, 0)] == [Deliver]
    (submit,) = router(Yielded("p", 1, 1, 3))
    assert isinstance(submit, Submit)
    assert (submit.worker, submit.attempt, submit.yield_after) == ("d", 2, 0)
    assert submit.source is not None
    assert router(Ready("d", 1, 2, 4, 0, AT)) == [Send("p", 1, 1, AT, 2, 4, 0)]
    assert router(Received("d", 1, 2, 4)) == [Drop("p", 1, 1)]
    commands = router.step("d", 2, 1, Finish.LENGTH)
    assert ends(commands) == [(1, Status.OK)]
    assert router.dispatcher.counters.num_handovers == 1
    assert router.dispatcher.num_requests == 0
    assert [worker.num_requests for worker in router.dispatcher.workers()] == [0, 0]


def test_the_decode_worker_meant_for_it_is_counted_from_the_start() -> None:
    tight = info_of("d", "decode", max_sequences=1)
    router = Router(P, tight)
    assert submits(router.arrive(1)) == [("p", 1, 1)]
    assert router.arrive(2) == []
    assert router.dispatcher.num_queued == 1
    assert submits(router(Gone(1))) == [("p", 2, 1)]


def test_it_goes_to_the_worker_meant_for_it_even_if_another_has_more_room_by_now() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0)
    router(Stepped("d", [], Load(running=3)))
    router(WorkerUp(E))
    assert submits(router(Yielded("p", 1, 1, 0))) == [("d", 1, 2)]


@pytest.mark.parametrize("trouble", ["suspect", "draining"])
def test_the_worker_meant_for_it_is_passed_over_when_in_trouble(trouble: str) -> None:
    router = Router(P, D, E)
    router.arrive()
    router.step("p", 1, 0)
    commands = router(Draining("d")) if trouble == "draining" else router.wait(2.5, "p", "e")
    assert commands == []
    assert submits(router(Yielded("p", 1, 1, 3))) == [("e", 1, 2)]


def test_a_yield_before_anything_was_done_means_placing_anew() -> None:
    router = Router(P, D)
    router.arrive()
    router(WorkerUp(info_of("q", "prefill")))
    assert router(Draining("p")) == [Yield("p", 1, 1)]
    assert submits(router(Yielded("p", 1, 1, 0))) == [("q", 1, 2)]


def test_the_decode_worker_meant_for_it_may_be_lost() -> None:
    router = Router(P, D, E)
    router.arrive()
    router(WorkerLost("d"))
    router.step("p", 1, 0)
    assert submits(router(Yielded("p", 1, 1, 3))) == [("e", 1, 2)]


def test_with_nobody_else_left_the_prefill_worker_goes_on() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0)
    router(WorkerLost("d"))
    commands = router(Yielded("p", 1, 1, 3))
    assert commands[0] == Drop("p", 1, 1)
    assert submits(commands) == [("p", 1, 2)]


def test_a_full_decode_pool_is_waited_for_with_the_lease() -> None:
    tight = info_of("d", "decode", max_sequences=1)
    router = Router(P, D)
    router.arrive(1)
    router.step("p", 1, 0)
    router(WorkerLost("d"))
    router(WorkerUp(tight))
    assert submits(router.arrive(2)) == [("p", 2, 1)]  # it has the only place at d
    assert router(Yielded("p", 1, 1, 3)) == []
    assert router.dispatcher.phases() == {Phase.YIELDED: 1, Phase.RUNNING: 1}
    (drop, _, submit) = router(Gone(2))
    assert drop == Drop("p", 2, 1)
    assert isinstance(submit, Submit)
    assert (submit.worker, submit.source is not None) == ("d", True)


# ------------------------------------------------------------------ what has ended


def test_offers_for_an_ended_request_are_dropped_and_nothing_else_happens() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0, Finish.STOP)
    assert router(Yielded("p", 1, 1, 3)) == [Drop("p", 1, 1)]
    assert router(Ready("d", 1, 2, 4, 0, AT)) == [Drop("d", 1, 2)]
    for event in (
        Received("d", 1, 2, 4),
        Failed("d", 1, 2, 4, ""),
        Rejected("d", 1, 2, ""),
        Gone(1),
        Stepped("p", [NewToken(1, 1, 0, 1, 5)], None, [(1, 1, "nan")]),
    ):
        assert router(event) == []


def test_a_worker_without_a_stream_is_not_listened_to() -> None:
    router = Router(M)
    router.arrive()
    assert router.step("ghost", 1, 0) == []
    assert router(Yielded("ghost", 9, 1, 3)) == []
    assert router(WorkerLost("ghost")) == []


def test_numbers_are_used_once() -> None:
    router = Router(M)
    router.arrive()
    with pytest.raises(ValueError, match="request 1 is here already"):
        router.arrive()


def test_a_complete_log_ends_at_once() -> None:
    router = Router(M)
    commands = router.arrive(log=[[1, 2]], max_tokens=2)
    assert commands == [Deliver(1, 0, 2, (), (), Finish.LENGTH), End(1, Status.OK)]
    assert router.dispatcher.num_ended == {Status.OK: 1}


# ------------------------------------------------------------------ the line


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    router = Router(limits=Limits(max_queued=2))
    assert router.arrive(1) == router.arrive(2) == []
    (end,) = router.arrive(3)
    assert isinstance(end, End)
    assert (end.status, end.retry_after) == (Status.OVERLOADED, 1.0)
    assert router.dispatcher.num_queued == 2
    assert router.dispatcher.num_queued_tokens == 6
    assert router.dispatcher.num_running == 0


def test_the_line_moves_when_there_is_room() -> None:
    router = Router(info_of("m", "mixed", max_sequences=2))
    assert submits(router.arrive(1) + router.arrive(2) + router.arrive(3)) == [
        ("m", 1, 1),
        ("m", 2, 1),
    ]
    assert submits(router.step("m", 1, 0, Finish.STOP, number=2)) == [("m", 3, 1)]


def test_without_workers_requests_wait_and_then_it_is_said() -> None:
    router = Router(limits=Limits(wait_without_workers=20.0))
    router.wait(60)
    router.arrive(1)
    router.arrive(2, deadline=router.now + 5)
    assert router.wait(4.5) == []
    assert ends(router.wait(1)) == [(2, Status.UNAVAILABLE)]
    assert router.wait(14) == []
    assert ends(router.wait(1)) == [(1, Status.UNAVAILABLE)]


def test_a_worker_that_comes_in_time_takes_what_waited() -> None:
    router = Router()
    router.arrive()
    router.wait(50)
    assert submits(router(WorkerUp(M))) == [("m", 1, 1)]
    assert ends(router.wait(100, "m")) == []


def test_workers_that_only_drain_are_not_waited_for() -> None:
    router = Router(M, limits=Limits(wait_without_workers=20.0))
    router.arrive(1)
    router.step("m", 1, 0)
    router(Draining("m"))
    assert router.arrive(2) == []
    assert ends(router.wait(21, "m")) == [(2, Status.UNAVAILABLE)]
    assert ends(router.step("m", 1, 1, Finish.STOP)) == [(1, Status.OK)]


def test_a_deadline_ends_it_everywhere() -> None:
    router = Router(M)
    router.arrive(deadline=router.now + 3)
    assert router.wait(2.5, "m") == []
    commands = router.wait(1, "m")
    assert commands == [Drop("m", 1, 1), End(1, Status.DEADLINE, "the deadline passed")]


# ------------------------------------------------------------------ workers silent and lost


def test_a_silent_worker_is_suspect_and_then_lost() -> None:
    router = Router(M, N)
    assert router.wait(2, "n") == []
    assert router.state("m") == "ready"
    router.wait(0.5, "n")
    assert router.state("m") == "suspect"
    assert submits(router.arrive(1) + router.arrive(2)) == [("n", 1, 1), ("n", 2, 1)]
    router(Heard("m"))
    assert router.state("m") == "ready"
    assert submits(router.arrive(3)) == [("m", 3, 1)]
    commands = router.wait(10.5, "n")
    assert isinstance(commands[0], Hang)
    assert submits(commands) == [("n", 3, 2)]


def test_a_worker_with_long_steps_may_be_silent_for_longer() -> None:
    router = Router(M)
    router(Stepped("m", [], Load(step_seconds=2.0)))
    assert router.wait(39) == []
    assert isinstance(router.wait(2)[0], Hang)


def test_the_routers_own_sleep_is_not_the_workers_silence() -> None:
    router = Router(M)
    router.wait(1)
    router.now += 60
    assert router(Tick()) == []
    assert router.state("m") == "ready"
    assert isinstance(router.wait(10.5)[-1], Hang)


def test_a_new_incarnation_implies_that_the_old_one_is_lost() -> None:
    router = Router(M)
    router.arrive()
    router.step("m", 1, 0)
    (submit,) = router(WorkerUp(info_of("m", "mixed", incarnation="2")))
    assert isinstance(submit, Submit)
    assert (submit.attempt, submit.log) == (2, ((50,),))
    assert router.dispatcher.counters.num_failovers == 1


def test_a_request_that_kills_is_not_tried_on_a_third_worker() -> None:
    router = Router(M, N, info_of("o", "mixed"))
    (submit,) = router.arrive()
    assert isinstance(submit, Submit)
    (submit,) = router(WorkerLost(submit.worker))
    assert isinstance(submit, Submit)
    assert ends(router(WorkerLost(submit.worker))) == [(1, Status.INTERNAL)]


def test_one_death_does_not_trample_the_others() -> None:
    router = Router(M, limits=Limits(recovering_per_worker=2))
    for number in (1, 2, 3, 4):
        router.arrive(number)
    router(WorkerUp(N))
    commands = router(WorkerLost("m"))
    assert submits(commands) == [("n", 1, 2), ("n", 2, 2)]
    assert router.dispatcher.num_queued == 2
    assert submits(router.step("n", 2, 0, number=1)) == [("n", 3, 2)]
    assert submits(router.step("n", 2, 1, number=1)) == []
    assert submits(router(Gone(2))) == [("n", 4, 2)]


def test_what_was_placed_before_goes_ahead_of_its_tenants_line() -> None:
    router = Router(info_of("m", "mixed", max_sequences=1), limits=Limits(max_queued=1))
    router.arrive(1)
    router.arrive(2)
    assert router(WorkerLost("m")) == []
    assert submits(router(WorkerUp(info_of("m", "mixed", max_sequences=1)))) == [("m", 1, 2)]


# ------------------------------------------------------------------ rejected


def test_a_worker_that_rejects_is_masked_until_its_next_load_report() -> None:
    router = Router(M, N)
    assert submits(router.arrive(1)) == [("m", 1, 1)]
    assert submits(router(Rejected("m", 1, 1, "full"))) == [("n", 1, 2)]
    assert router(Rejected("n", 1, 2, "full")) == []
    assert router.dispatcher.num_queued == 1
    assert router(Stepped("m", [])) == []  # says nothing of its load
    assert submits(router(Stepped("m", [], Load()))) == [("m", 1, 3)]


def test_an_idle_worker_is_not_masked_for_ever() -> None:
    router = Router(M)
    router.arrive()
    router(Rejected("m", 1, 1, "full"))
    assert submits(router.wait(3, "m")) == [("m", 1, 2)]


def test_what_can_never_fit_is_invalid() -> None:
    router = Router(M, N)
    router.arrive()
    assert router(Rejected("m", 1, 1, "too long", never=True)) == [
        End(1, Status.INVALID, "too long")
    ]


def test_what_can_never_fit_here_is_tried_on_larger_workers_only() -> None:
    router = Router(M, N, info_of("xl", "mixed", max_model_len=128))
    router.arrive()
    assert submits(router(Rejected("m", 1, 1, "too long", never=True))) == [("xl", 1, 2)]
    assert ends(router(Rejected("xl", 1, 2, "too long", never=True))) == [(1, Status.INVALID)]


def test_what_fits_on_nobody_that_is_left_does_not_block_the_line() -> None:
    router = Router(M, info_of("xl", "mixed", max_model_len=128, max_sequences=1))
    router.arrive(1)
    router(Rejected("m", 1, 1, "too long", never=True))
    router(WorkerLost("xl"))
    assert router.dispatcher.num_ended == {Status.INVALID: 1}
    assert submits(router.arrive(2)) == [("m", 2, 1)]


# ------------------------------------------------------------------ nonsense


def test_repeated_gaps_close_the_stream() -> None:
    router = Router(M, limits=Limits(max_gaps=3))
    router.arrive()
    assert router.step("m", 1, 1) == [Drop("m", 1, 1), *router_submits(2)]
    assert router.step("m", 2, 5) == [Drop("m", 1, 2), *router_submits(3)]
    commands = router.step("m", 3, 5)
    assert commands[:2] == [Drop("m", 1, 3), Hang("m", "3 times tokens were missing")]
    assert router.dispatcher.counters.num_gaps == 3
    assert not router.dispatcher.workers()
    assert submits(router(WorkerUp(M))) == [("m", 1, 4)]


def router_submits(attempt: int) -> list[Command]:
    request = Request(1, [7] * 3, None)
    return [Submit("m", request, attempt, ((),), (False,), None, 0)]


def test_an_error_of_the_workers_ends_only_that_request() -> None:
    router = Router(M)
    router.arrive(1)
    router.arrive(2)
    commands = router(Stepped("m", [NewToken(2, 1, 0, 0, 9)], None, [(1, 1, "not finite")]))
    assert commands[1:] == [End(1, Status.INTERNAL, "not finite")]
    assert router.dispatcher.num_requests == 1


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


# ------------------------------------------------------------------ hand-overs that fail


def test_a_failed_hand_over_is_counted_and_costs_nothing_else() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    router(Ready("d", 1, 2, 4, 0, AT))
    assert router(Failed("d", 1, 2, 4, "broken")) == [Drop("p", 1, 1)]
    assert router.dispatcher.counters.num_handovers_failed == 1
    assert [type(c) for c in router.step("d", 2, 1)] == [Deliver]


def test_a_loaded_worker_is_told_of_in_the_status() -> None:
    router = Router(M)
    router(Stepped("m", [], Load(running=3)))
    router.arrive()
    (status,) = router.dispatcher.workers()
    assert (status.worker, status.incarnation, status.role) == ("m", "1", "mixed")
    assert (status.num_requests, status.load.running) == (1, 3)
