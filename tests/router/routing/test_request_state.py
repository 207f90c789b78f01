"""One test, or more, for each row of the table in docs/lifecycle.md."""

from collections.abc import Callable

import pytest

from penstock.router.routing.events import (
    Deliver,
    Drop,
    EndRequest,
    Finish,
    Send,
    Status,
    Submit,
)
from penstock.router.routing.request_state import Phase
from penstock.router.routing.token_log import AppendResult
from tests.support.request_history import (
    AT,
    HELD,
    LEASE,
    STATES,
    RequestHistory,
    V,
    W,
    moving,
    running,
    submit,
    waiting,
    yielded,
)

# ------------------------------------------------------------------ the straight road


@pytest.mark.parametrize("phase", STATES)
def test_states_are_what_they_are_called(phase: Phase) -> None:
    assert STATES[phase]().phase is phase


def test_the_way_of_a_request_through_prefill_and_decode() -> None:
    story = RequestHistory().place(W, 1)
    assert story.out == [Submit("w", story.life.request, 1, ((),), (False,), None, 1)]
    assert story.token("w", 1, 0) is AppendResult.STATE_CHANGED
    assert story.out == [Deliver(1, 0, 0, (100,), (None,), Finish.NONE)]
    story.yielded()
    assert story.out == []
    story.place(V)
    assert story.out == [submit("v", 2, (100,), LEASE)]
    story.ready()
    assert story.out == [Send("w", 1, 1, AT, 2, 9, 2)]
    assert story.does(lambda out: story.life.received("v", 2, 9, out)) is True
    assert story.out == [Drop("w", 1, 1)]
    assert story.phase is Phase.RUNNING
    assert story.token("v", 2, 1) is AppendResult.STATE_CHANGED
    assert story.token("v", 2, 2) is AppendResult.APPENDED
    assert story.token("v", 2, 3, Finish.STOP) is AppendResult.STATE_CHANGED
    assert story.out == [
        Deliver(1, 0, 3, (103,), (None,), Finish.STOP),
        EndRequest(1, Status.OK, ""),
    ]


@pytest.mark.parametrize("make", [waiting, moving])
def test_a_step_from_the_next_worker_implies_that_it_runs(
    make: Callable[[], RequestHistory],
) -> None:
    story = make()
    assert story.token("v", 2, 1) is AppendResult.STATE_CHANGED
    assert story.out == [Drop("w", 1, 1), Deliver(1, 0, 1, (101,), (None,), Finish.NONE)]
    assert story.phase is Phase.RUNNING


def test_a_finish_beats_a_yield() -> None:
    story = RequestHistory().place(W, 1)
    story.token("w", 1, 0, Finish.STOP)
    assert story.out[-1] == EndRequest(1, Status.OK, "")
    story.life.status = None  # a late yield is dropped, also for a request that has not ended
    story.out = []
    story.life.yielded("w", 1, 3, story.out)
    assert story.out == [Drop("w", 1, 1)]


# ------------------------------------------------------------------ Step


def test_known_positions_are_dropped() -> None:
    story = running()
    assert story.token("w", 1, 0) is AppendResult.DUPLICATE
    assert story.out == []
    assert story.life.token_log.answers == [[100]]


def test_a_gap_is_seen_and_fails_the_attempt() -> None:
    story = running()
    assert story.token("w", 1, 2) is AppendResult.GAP
    story.does(story.life.fail_attempt)
    assert story.out == [Drop("w", 1, 1)]
    assert story.phase is Phase.QUEUED
    story.place(V)
    assert story.out == [submit("v", 2, (100,), None)]


def test_a_choice_that_is_not_there_is_a_gap() -> None:
    assert running().token("w", 1, 1, choice=1) is AppendResult.GAP


def test_a_token_of_an_old_attempt_changes_nothing() -> None:
    story = running()
    story.does(lambda out: story.life.worker_lost("w", out))
    story.place(W)
    assert story.token("w", 1, 1) is AppendResult.DUPLICATE
    assert story.out == []
    assert story.life.token_log.answers == [[100]]
    assert story.token("w", 2, 1) is AppendResult.STATE_CHANGED


def test_a_token_of_another_worker_changes_nothing() -> None:
    assert running().token("x", 1, 1) is AppendResult.DUPLICATE


def test_after_the_yield_nothing_comes_from_there() -> None:
    story = yielded()
    assert story.token("w", 1, 1) is AppendResult.DUPLICATE


# ------------------------------------------------------------------ client gone, deadline


@pytest.mark.parametrize("phase", STATES)
@pytest.mark.parametrize("status", [Status.CANCELLED, Status.DEADLINE])
def test_an_end_drops_everywhere(phase: Phase, status: Status) -> None:
    story = STATES[phase]()
    story.does(lambda out: story.life.end(status, "why", out))
    assert story.out == [*HELD[phase], EndRequest(1, status, "why")]
    assert story.phase is Phase.DONE


# ------------------------------------------------------------------ Cut


@pytest.mark.parametrize("phase", [phase for phase in STATES if phase is not Phase.QUEUED])
def test_a_stop_string_cuts_the_log_and_ends(phase: Phase) -> None:
    story = STATES[phase]()
    story.does(lambda out: story.life.stop_choice(0, 0, out))
    assert story.out == [*HELD[phase], EndRequest(1, Status.OK, "")]
    assert story.life.token_log.answers == [[]]


def test_a_cut_choice_is_dropped_and_the_others_go_on() -> None:
    story = RequestHistory(num_choices=2).place()
    story.token("w", 1, 0)
    story.token("w", 1, 0, choice=1)
    story.does(lambda out: story.life.stop_choice(0, 0, out))
    assert story.out == [Drop("w", 1, 1, 0)]
    assert story.token("w", 1, 1) is AppendResult.DUPLICATE
    story.does(lambda out: story.life.worker_lost("w", out))
    story.place(V)
    request = story.life.request
    assert story.out == [Submit("v", request, 2, ((), (100,)), (True, False), None, 0)]
    assert story.token("v", 2, 1, Finish.LENGTH, choice=1) is AppendResult.STATE_CHANGED
    assert story.out[-1] == EndRequest(1, Status.OK, "")


def test_a_cut_of_no_choice_changes_nothing() -> None:
    story = running()
    story.does(lambda out: story.life.stop_choice(1, 0, out))
    assert (story.out, story.phase) == ([], Phase.RUNNING)


def test_a_cut_that_comes_after_the_finish_changes_nothing() -> None:
    story = RequestHistory(num_choices=2).place()
    story.token("w", 1, 0, Finish.STOP)
    story.does(lambda out: story.life.stop_choice(0, 0, out))
    assert story.out == []
    assert story.life.token_log.answers == [[100], []]


# ------------------------------------------------------------------ given up


@pytest.mark.parametrize(("make", "name"), [(running, ("w", 1)), (moving, ("v", 2))])
def test_an_error_of_the_workers_ends_it(
    make: Callable[[], RequestHistory], name: tuple[str, int]
) -> None:
    story = make()
    assert story.does(lambda out: story.life.aborted(*name, "not finite", out)) is True
    assert story.out[-1] == EndRequest(1, Status.INTERNAL, "not finite")


def test_an_error_of_an_old_attempt_changes_nothing() -> None:
    story = moving()
    assert story.does(lambda out: story.life.aborted("w", 1, "not finite", out)) is False
    assert (story.out, story.phase) == ([], Phase.TRANSFERRING)


# ------------------------------------------------------------------ a log from before


def test_a_log_that_the_client_brought_is_gone_on_from() -> None:
    story = RequestHistory(log=[[8, 9]], max_tokens=3).place()
    assert story.out == [Submit("w", story.life.request, 1, ((8, 9),), (False,), None, 0)]
    assert story.life.token_log.num_remaining == 1
    assert story.token("w", 1, 1) is AppendResult.DUPLICATE
    assert story.token("w", 1, 2, Finish.LENGTH) is AppendResult.STATE_CHANGED
    assert story.out[0] == Deliver(1, 0, 2, (102,), (None,), Finish.LENGTH)
