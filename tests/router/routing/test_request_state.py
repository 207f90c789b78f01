"""Tests of the table of states in docs/lifecycle.md; see also `test_request_state_transfers.py`."""

from collections.abc import Callable

import pytest

from penstock.router.routing.events import (
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
    running,
    submit,
    transferring,
    waiting,
    yielded,
)

# ------------------------------------------------------------------ without failures


@pytest.mark.parametrize("phase", STATES)
def test_each_history_is_in_the_state_of_its_key(phase: Phase) -> None:
    assert STATES[phase]().phase is phase


def test_request_goes_through_prefill_transfer_and_decode() -> None:
    history = RequestHistory().place(W, 1)
    assert history.commands == [Submit("w", history.state.request, 1, ((),), (False,), None, 1)]
    assert history.token("w", 1, 0) is AppendResult.STATE_CHANGED
    assert history.commands == []
    assert history.state.token_log.answers == [[100]]
    history.yielded()
    assert history.commands == []
    history.place(V)
    assert history.commands == [submit("v", 2, (100,), LEASE)]
    history.ready()
    assert history.commands == [Send("w", 1, 1, AT, 2, 9, 2)]
    assert history.apply(lambda out: history.state.received("v", 2, 9, out)) is True
    assert history.commands == [Drop("w", 1, 1)]
    assert history.phase is Phase.RUNNING
    assert history.token("v", 2, 1) is AppendResult.STATE_CHANGED
    assert history.token("v", 2, 2) is AppendResult.APPENDED
    assert history.token("v", 2, 3, Finish.STOP) is AppendResult.STATE_CHANGED
    assert history.commands == [EndRequest(1, Status.OK, "")]
    assert history.state.token_log.answers == [[100, 101, 102, 103]]


@pytest.mark.parametrize("make", [waiting, transferring])
def test_step_from_the_destination_implies_that_it_runs(
    make: Callable[[], RequestHistory],
) -> None:
    history = make()
    assert history.token("v", 2, 1) is AppendResult.STATE_CHANGED
    assert history.commands == [Drop("w", 1, 1)]
    assert history.state.token_log.answers == [[100, 101]]
    assert history.phase is Phase.RUNNING


def test_finish_takes_precedence_over_a_yield() -> None:
    history = RequestHistory().place(W, 1)
    history.token("w", 1, 0, Finish.STOP)
    assert history.commands[-1] == EndRequest(1, Status.OK, "")
    # Pretend that the request has not ended: its late lease must still be dropped.
    history.state.status = None
    history.commands = []
    history.state.yielded("w", 1, 3, history.commands)
    assert history.commands == [Drop("w", 1, 1)]


# ------------------------------------------------------------------ tokens


def test_tokens_at_known_positions_are_ignored() -> None:
    history = running()
    assert history.token("w", 1, 0) is AppendResult.DUPLICATE
    assert history.commands == []
    assert history.state.token_log.answers == [[100]]


def test_gap_in_positions_fails_the_attempt() -> None:
    history = running()
    assert history.token("w", 1, 2) is AppendResult.GAP
    history.apply(history.state.fail_attempt)
    assert history.commands == [Drop("w", 1, 1)]
    assert history.phase is Phase.QUEUED
    history.place(V)
    assert history.commands == [submit("v", 2, (100,), None)]


def test_token_of_an_unknown_choice_counts_as_a_gap() -> None:
    assert running().token("w", 1, 1, choice=1) is AppendResult.GAP


def test_a_token_of_an_old_attempt_changes_nothing() -> None:
    history = running()
    history.apply(lambda out: history.state.worker_lost("w", out))
    history.place(W)
    assert history.token("w", 1, 1) is AppendResult.DUPLICATE
    assert history.commands == []
    assert history.state.token_log.answers == [[100]]
    assert history.token("w", 2, 1) is AppendResult.STATE_CHANGED


def test_a_token_of_another_worker_changes_nothing() -> None:
    assert running().token("x", 1, 1) is AppendResult.DUPLICATE


def test_token_after_the_yield_is_ignored() -> None:
    history = yielded()
    assert history.token("w", 1, 1) is AppendResult.DUPLICATE


# ------------------------------------------------------------------ client disconnected, deadline


@pytest.mark.parametrize("phase", STATES)
@pytest.mark.parametrize("status", [Status.CANCELLED, Status.DEADLINE])
def test_end_drops_the_request_on_every_worker(phase: Phase, status: Status) -> None:
    history = STATES[phase]()
    history.apply(lambda out: history.state.end(status, "why", out))
    assert history.commands == [*HELD[phase], EndRequest(1, status, "why")]
    assert history.phase is Phase.DONE


# ------------------------------------------------------------------ stop strings


@pytest.mark.parametrize("phase", [phase for phase in STATES if phase is not Phase.QUEUED])
def test_stop_string_cuts_the_log_and_ends_the_request(phase: Phase) -> None:
    history = STATES[phase]()
    history.apply(lambda out: history.state.stop_choice(0, 0, out))
    assert history.commands == [*HELD[phase], EndRequest(1, Status.OK, "")]
    assert history.state.token_log.answers == [[]]


def test_stopped_choice_is_dropped_and_the_others_continue() -> None:
    history = RequestHistory(num_choices=2).place()
    history.token("w", 1, 0)
    history.token("w", 1, 0, choice=1)
    history.apply(lambda out: history.state.stop_choice(0, 0, out))
    assert history.commands == [Drop("w", 1, 1, 0)]
    assert history.token("w", 1, 1) is AppendResult.DUPLICATE
    history.apply(lambda out: history.state.worker_lost("w", out))
    history.place(V)
    request = history.state.request
    assert history.commands == [Submit("v", request, 2, ((), (100,)), (True, False), None, 0)]
    assert history.token("v", 2, 1, Finish.LENGTH, choice=1) is AppendResult.STATE_CHANGED
    assert history.commands[-1] == EndRequest(1, Status.OK, "")


def test_stop_of_an_unknown_choice_changes_nothing() -> None:
    history = running()
    history.apply(lambda out: history.state.stop_choice(1, 0, out))
    assert (history.commands, history.phase) == ([], Phase.RUNNING)


def test_stop_after_the_finish_changes_nothing() -> None:
    history = RequestHistory(num_choices=2).place()
    history.token("w", 1, 0, Finish.STOP)
    history.apply(lambda out: history.state.stop_choice(0, 0, out))
    assert history.commands == []
    assert history.state.token_log.answers == [[100], []]


# ------------------------------------------------------------------ errors from workers


@pytest.mark.parametrize(("make", "name"), [(running, ("w", 1)), (transferring, ("v", 2))])
def test_error_from_the_running_worker_ends_the_request(
    make: Callable[[], RequestHistory], name: tuple[str, int]
) -> None:
    history = make()
    assert history.apply(lambda out: history.state.aborted(*name, "not finite", out)) is True
    assert history.commands[-1] == EndRequest(1, Status.INTERNAL, "not finite")


def test_an_error_of_an_old_attempt_changes_nothing() -> None:
    history = transferring()
    assert history.apply(lambda out: history.state.aborted("w", 1, "not finite", out)) is False
    assert (history.commands, history.phase) == ([], Phase.TRANSFERRING)


# ------------------------------------------------------------------ resumed requests


def test_request_continues_from_the_log_that_the_client_sent() -> None:
    history = RequestHistory(log=[[8, 9]], max_tokens=3).place()
    assert history.commands == [Submit("w", history.state.request, 1, ((8, 9),), (False,), None, 0)]
    assert history.state.token_log.num_remaining == 1
    assert history.token("w", 1, 1) is AppendResult.DUPLICATE
    assert history.token("w", 1, 2, Finish.LENGTH) is AppendResult.STATE_CHANGED
    assert history.state.token_log.answers == [[8, 9, 102]]
