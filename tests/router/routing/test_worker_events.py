from dataclasses import replace

from penstock.common.sampling_params import SamplingParams
from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.dispatcher import DispatcherLimits
from penstock.router.routing.events import (
    ClientDisconnected,
    CloseStream,
    Command,
    Deliver,
    Drop,
    EndRequest,
    Failed,
    Finish,
    Heartbeat,
    Ready,
    Received,
    Rejected,
    Request,
    Send,
    Status,
    Stepped,
    Submit,
    Tick,
    TokenColumns,
    WorkerLost,
    WorkerUp,
    Yielded,
)
from penstock.router.routing.token_runs import TokenRun
from tests.support.columns import NewToken, columns_of
from tests.support.router_harness import AT, D, M, N, P, Router, ends, submits
from tests.support.router_world import info_of

# ------------------------------------------------------------------ silent and lost workers


def test_a_silent_worker_is_suspect_and_then_lost() -> None:
    router = Router(M, N)
    assert router.wait(2, "n") == []
    assert router.state("m") == "ready"
    router.wait(0.5, "n")
    assert router.state("m") == "suspect"
    assert submits(router.arrive(1) + router.arrive(2)) == [("n", 1, 1), ("n", 2, 1)]
    router(Heartbeat("m"))
    assert router.state("m") == "ready"
    assert submits(router.arrive(3)) == [("m", 3, 1)]
    commands = router.wait(10.5, "n")
    assert isinstance(commands[0], CloseStream)
    assert submits(commands) == [("n", 3, 2)]


def test_only_ready_workers_count_for_the_ready_roles() -> None:
    router = Router(P, D)
    assert router.dispatcher.ready_roles == {"prefill", "decode"}
    router.wait(2.5, "d")
    assert router.state("p") == "suspect"
    assert router.dispatcher.ready_roles == {"decode"}


def test_a_worker_with_long_steps_may_be_silent_for_longer() -> None:
    router = Router(M)
    router(Stepped("m", TokenColumns(), WorkerLoad(last_step_seconds=2.0)))
    assert router.wait(39) == []
    assert isinstance(router.wait(2)[0], CloseStream)


def test_duration_that_a_worker_reports_extends_the_silence_to_ten_minutes_at_most() -> None:
    router = Router(M)
    router(Stepped("m", TokenColumns(), WorkerLoad(last_step_seconds=4000.0)))
    assert router.wait(599) == []
    assert isinstance(router.wait(2)[0], CloseStream)


def test_pause_of_the_router_does_not_count_as_silence_of_workers() -> None:
    router = Router(M)
    router.wait(1)
    router.now += 60
    assert router(Tick()) == []
    assert router.state("m") == "ready"
    assert isinstance(router.wait(10.5)[-1], CloseStream)


def test_a_new_incarnation_implies_that_the_old_one_is_lost() -> None:
    router = Router(M)
    router.arrive()
    router.step("m", 1, 0)
    (submit,) = router(WorkerUp(info_of("m", "mixed", incarnation="2")))
    assert isinstance(submit, Submit)
    assert (submit.attempt, submit.log) == (2, ((50,),))
    assert router.dispatcher.counters.num_failovers == 1


def test_request_that_lost_two_workers_is_not_tried_on_a_third() -> None:
    router = Router(M, N, info_of("o", "mixed"))
    (submit,) = router.arrive()
    assert isinstance(submit, Submit)
    (submit,) = router(WorkerLost(submit.worker))
    assert isinstance(submit, Submit)
    assert ends(router(WorkerLost(submit.worker))) == [(1, Status.INTERNAL)]


def test_recovery_after_a_worker_loss_is_throttled() -> None:
    router = Router(M, limits=DispatcherLimits(max_recovering_per_worker=2))
    for number in (1, 2, 3, 4):
        router.arrive(number)
    router(WorkerUp(N))
    commands = router(WorkerLost("m"))
    assert submits(commands) == [("n", 1, 2), ("n", 2, 2)]
    assert router.dispatcher.num_queued == router.dispatcher.num_held_back == 2
    assert submits(router.step("n", 2, 0, number=1)) == [("n", 3, 2)]
    assert router.dispatcher.num_queued == router.dispatcher.num_held_back == 1
    assert submits(router.step("n", 2, 1, number=1)) == []
    assert submits(router(ClientDisconnected(2))) == [("n", 4, 2)]


def test_requeued_request_goes_to_the_front_of_its_tenants_queue() -> None:
    router = Router(info_of("m", "mixed", max_sequences=1), limits=DispatcherLimits(max_queued=1))
    router.arrive(1)
    router.arrive(2)
    assert router(WorkerLost("m")) == []
    assert submits(router(WorkerUp(info_of("m", "mixed", max_sequences=1)))) == [("m", 1, 2)]


# ------------------------------------------------------------------ rejections


def test_worker_that_rejects_gets_no_requests_until_its_next_load_report() -> None:
    router = Router(M, N)
    assert submits(router.arrive(1)) == [("m", 1, 1)]
    assert submits(router(Rejected("m", 1, 1, "full"))) == [("n", 1, 2)]
    assert router(Rejected("n", 1, 2, "full")) == []
    assert router.dispatcher.num_queued == 1
    # Only a load report ends the pause, and this event has none.
    assert router(Stepped("m", TokenColumns())) == []
    assert submits(router(Stepped("m", TokenColumns(), WorkerLoad()))) == [("m", 1, 3)]


def test_idle_worker_that_rejected_gets_requests_again_after_a_while() -> None:
    router = Router(M)
    router.arrive()
    router(Rejected("m", 1, 1, "full"))
    assert submits(router.wait(3, "m")) == [("m", 1, 2)]


def test_request_that_fits_on_no_worker_is_invalid() -> None:
    router = Router(M, N)
    router.arrive()
    assert router(Rejected("m", 1, 1, "too long", is_permanent=True)) == [
        EndRequest(1, Status.INVALID, "too long")
    ]


def test_permanently_rejected_request_is_tried_on_larger_workers_only() -> None:
    router = Router(M, N, info_of("xl", "mixed", max_model_len=128))
    router.arrive()
    assert submits(router(Rejected("m", 1, 1, "too long", is_permanent=True))) == [("xl", 1, 2)]
    assert ends(router(Rejected("xl", 1, 2, "too long", is_permanent=True))) == [
        (1, Status.INVALID)
    ]


def test_request_that_fits_on_no_remaining_worker_does_not_block_the_queue() -> None:
    router = Router(M, info_of("xl", "mixed", max_model_len=128, max_sequences=1))
    router.arrive(1)
    router(Rejected("m", 1, 1, "too long", is_permanent=True))
    router(WorkerLost("xl"))
    assert router.dispatcher.num_ended == {Status.INVALID: 1}
    assert submits(router.arrive(2)) == [("m", 2, 1)]


# ------------------------------------------------------------------ invalid messages and errors


def test_repeated_gaps_close_the_stream() -> None:
    router = Router(M, limits=DispatcherLimits(max_gaps=3))
    router.arrive()
    assert router.step("m", 1, 1) == [Drop("m", 1, 1), *router_submits(2)]
    assert router.step("m", 2, 5) == [Drop("m", 1, 2), *router_submits(3)]
    commands = router.step("m", 3, 5)
    assert commands[:2] == [Drop("m", 1, 3), CloseStream("m", "1", "tokens were missing 3 times")]
    assert router.dispatcher.counters.num_gaps == 3
    assert not router.dispatcher.workers()
    assert submits(router(WorkerUp(M))) == [("m", 1, 4)]


def router_submits(attempt: int) -> list[Command]:
    request = Request(1, [7] * 3, SamplingParams())
    return [Submit("m", request, attempt, ((),), (False,), None, 0)]


def test_error_from_a_worker_ends_only_its_request() -> None:
    router = Router(M)
    router.arrive(1)
    router.arrive(2)
    commands = router(
        Stepped("m", columns_of([NewToken(2, 1, 0, 0, 9)]), None, [(1, 1, "not finite")])
    )
    assert commands[1:] == [EndRequest(1, Status.INTERNAL, "not finite")]
    assert router.dispatcher.num_requests == 1


# ------------------------------------------------------------------ failed transfers and status


def test_failed_transfer_is_counted_and_the_request_continues() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    router(Ready("d", 1, 2, 4, 0, AT))
    assert router(Failed("d", 1, 2, 4, "broken")) == [Drop("p", 1, 1)]
    assert router.dispatcher.counters.num_transfers_failed == 1
    assert [worker.num_requests for worker in router.dispatcher.workers()] == [0, 1]
    assert [type(c) for c in router.step("d", 2, 1)] == [Deliver]


def test_prompt_is_not_recomputed_after_the_destination_of_its_transfer_was_lost() -> None:
    router = Router(P, D, info_of("d2", "decode"))
    router.arrive()
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    router(Ready("d", 1, 2, 4, 0, AT))
    assert submits(router(WorkerLost("d"))) == [("d2", 1, 3)]
    # The source reports that it could not send to the lost worker, before or after Ready.
    late = Failed("p", 1, 1, 4, "p could not send: the connection is closed")
    assert router(late) == []
    assert [type(command) for command in router(Ready("d2", 1, 3, 1, 0, AT))] == [Send]
    assert router(late) == []
    assert [router(Tick()) for _ in range(3)] == [[], [], []]
    assert router(Received("d2", 1, 3, 1)) == [Drop("p", 1, 1)]


def test_status_has_role_requests_and_load_of_each_worker() -> None:
    router = Router(M)
    router(Stepped("m", TokenColumns(), WorkerLoad(running=3)))
    router.arrive()
    (status,) = router.dispatcher.workers()
    assert (status.worker, status.incarnation, status.role) == ("m", "1", "mixed")
    assert (status.num_requests, status.load.running) == (1, 3)


def test_run_of_tokens_is_appended_as_a_whole_or_not_at_all() -> None:
    router = Router(M)
    append = router.dispatcher.append_runs
    router.arrive(1)
    router.arrive(2)
    assert not append("m", [TokenRun(1, 1, 0, 0, [5, 6])]), "the first token starts the attempt"
    router(Stepped("m", columns_of([NewToken(1, 1, 0, 0, 5), NewToken(2, 1, 0, 0, 6)])))
    for wrong in (
        ("n", TokenRun(2, 1, 0, 1, [7])),  # n does not run request 2
        ("m", TokenRun(2, 2, 0, 1, [7])),  # request 2 has no attempt 2
        ("m", TokenRun(2, 1, 1, 1, [7])),  # request 2 has no choice 1
        ("m", TokenRun(2, 1, 0, 2, [7])),  # position 1 is missing
        ("m", TokenRun(9, 1, 0, 1, [7])),  # there is no request 9
    ):
        assert not append(wrong[0], [TokenRun(1, 1, 0, 1, [6, 7]), wrong[1]])
    assert append("m", [TokenRun(1, 1, 0, 1, [6, 7]), TokenRun(2, 1, 0, 1, [7, 8])])
    router(WorkerUp(N))
    submit, _ = router(WorkerLost("m"))
    assert isinstance(submit, Submit)
    assert submit.log == ((5, 6, 7),)


def test_refused_tokens_of_a_step_are_not_delivered() -> None:
    router = Router(M)
    router.arrive(1)
    router.arrive(2)
    router(Stepped("m", columns_of([NewToken(1, 1, 0, 0, 5), NewToken(2, 1, 0, 0, 6)])))
    logprobs = {0: "unknown", 1: "again", 3: "new"}
    step = [
        NewToken(9, 1, 0, 0, 7),  # refused: the request is unknown
        NewToken(1, 1, 0, 0, 5),  # refused: the position is already known
        NewToken(1, 1, 0, 1, 8),
        NewToken(2, 1, 0, 1, 9, Finish.LENGTH),
        NewToken(2, 1, 0, 2, 4),  # refused: the request has ended
    ]
    commands = router(Stepped("m", replace(columns_of(step), logprobs=logprobs)))
    accepted = replace(columns_of([step[2], step[3]]), logprobs={1: "new"})
    assert commands == [Deliver(accepted), EndRequest(2, Status.OK)]
