"""Tests of the table of states in docs/lifecycle.md: KV transfers, lost workers and drains."""

from collections.abc import Callable

import pytest

from penstock.router.routing.events import (
    Command,
    Drop,
    EndRequest,
    Finish,
    Send,
    Source,
    Status,
    Yield,
)
from penstock.router.routing.request_state import Phase, RequestState
from penstock.router.routing.token_log import AppendResult
from tests.support.request_history import (
    AT,
    LEASE,
    STATES,
    RequestHistory,
    V,
    W,
    X,
    migrating,
    running,
    submit,
    transferring,
    waiting,
    yielded,
)
from tests.support.router_world import info_of

# ------------------------------------------------------------------ Rejected


def test_rejected_while_running_is_placed_elsewhere() -> None:
    history = RequestHistory().place(W, 1)
    assert history.apply(lambda out: history.state.rejected("w", 1, out)) is True
    assert (history.commands, history.phase) == ([], Phase.QUEUED)
    history.place(V)
    assert history.commands == [submit("v", 2, (), None)]


def test_rejected_while_waiting_keeps_the_lease_as_source() -> None:
    history = waiting()
    assert history.apply(lambda out: history.state.rejected("v", 2, out)) is True
    assert (history.commands, history.phase) == ([], Phase.YIELDED)
    history.place(X)
    assert history.commands == [submit("x", 3, (100,), LEASE)]


@pytest.mark.parametrize("make", [waiting, transferring])
def test_next_worker_may_yield_before_its_first_token(
    make: Callable[[], RequestHistory],
) -> None:
    history = make().yielded("v", 2)
    assert (history.commands, history.phase) == ([Drop("w", 1, 1)], Phase.YIELDED)
    history.place(X)
    assert history.commands == [submit("x", 3, (100,), Source("v", "1", 2, 3, "L"))]


def test_rejected_of_an_old_attempt_changes_nothing() -> None:
    history = transferring()
    assert history.apply(lambda out: history.state.rejected("v", 1, out)) is False
    assert history.phase is Phase.TRANSFERRING


# ------------------------------------------------------------------ workers lost


def test_loss_of_the_running_worker_starts_a_new_attempt_with_the_log() -> None:
    history = running()
    assert history.apply(lambda out: history.state.worker_lost("w", out)) is True
    assert (history.commands, history.phase) == ([], Phase.QUEUED)
    history.place(V)
    assert history.commands == [submit("v", 2, (100,), None)]


def test_request_ends_after_two_losses_of_its_running_worker() -> None:
    history = running()
    history.apply(lambda out: history.state.worker_lost("w", out))
    history.place(V)
    assert history.apply(lambda out: history.state.worker_lost("v", out)) is True
    (end,) = history.commands
    assert isinstance(end, EndRequest)
    assert end.status is Status.INTERNAL


def test_losses_of_workers_that_did_not_run_the_request_do_not_count() -> None:
    history = waiting()
    for worker in (V, X, V, X):
        counts = history.apply(lambda out, w=worker: history.state.worker_lost(w.worker, out))  # type: ignore[misc]
        assert counts is False
        assert history.phase is Phase.YIELDED
        history.place(X if worker is V else V)
    assert history.state.num_losses == 0


@pytest.mark.parametrize("make", [waiting, transferring])
def test_loss_of_the_destination_keeps_the_lease_as_source(
    make: Callable[[], RequestHistory],
) -> None:
    history = make()
    history.apply(lambda out: history.state.worker_lost("v", out))
    assert (history.commands, history.phase) == ([], Phase.YIELDED)
    history.place(X)
    assert history.commands == [submit("x", 3, (100,), LEASE)]


@pytest.mark.parametrize("make", [waiting, transferring])
def test_loss_of_the_source_changes_nothing_at_first(make: Callable[[], RequestHistory]) -> None:
    history = make()
    assert history.apply(lambda out: history.state.worker_lost("w", out)) is False
    assert (history.commands, history.phase) == ([], make().phase)
    assert history.token("v", 2, 1) is AppendResult.STATE_CHANGED
    assert history.phase is Phase.RUNNING


@pytest.mark.parametrize(
    "lose_source",
    [
        lambda state, out: state.worker_lost("w", out),
        lambda state, out: state.failed("w", 1, 9, out),
    ],
)
def test_transfer_with_a_lost_source_is_abandoned_at_the_second_check(
    lose_source: Callable[[RequestState, list[Command]], bool],
) -> None:
    history = transferring()
    assert history.apply(history.state.check_source) is False, "its source still exists"
    history.apply(lambda out: lose_source(history.state, out))
    assert history.apply(history.state.check_source) is False
    assert (history.commands, history.phase) == ([], Phase.TRANSFERRING)
    assert history.apply(history.state.check_source) is True
    assert history.commands == [Drop("v", 1, 2), submit("v", 3, (100,), None)]
    assert history.phase is Phase.RUNNING
    assert history.apply(history.state.check_source) is False


@pytest.mark.parametrize("make", [running, yielded, waiting])
def test_source_check_does_nothing_without_a_transfer_in_progress(
    make: Callable[[], RequestHistory],
) -> None:
    history = make()
    history.apply(lambda out: history.state.worker_lost("w", out))
    phase = history.phase
    for _ in range(3):
        assert history.apply(history.state.check_source) is False
    assert (history.commands, history.phase) == ([], phase)


def test_loss_of_the_source_before_placement_requeues_the_request() -> None:
    history = yielded()
    assert history.apply(lambda out: history.state.worker_lost("w", out)) is False
    assert history.phase is Phase.QUEUED
    history.place(X)
    assert history.commands == [submit("x", 2, (100,), None)]


def test_ready_for_a_lost_source_restarts_there_without_a_source() -> None:
    history = waiting()
    history.apply(lambda out: history.state.worker_lost("w", out))
    history.ready()
    assert history.commands == [Drop("v", 1, 2), submit("v", 3, (100,), None)]
    assert history.phase is Phase.RUNNING


# ------------------------------------------------------------------ Failed


@pytest.mark.parametrize("make", [waiting, transferring])
def test_failure_at_the_destination_makes_it_compute_the_tokens(
    make: Callable[[], RequestHistory],
) -> None:
    history = make()
    assert history.apply(lambda out: history.state.failed("v", 2, 9, out)) is True
    assert (history.commands, history.phase) == ([Drop("w", 1, 1)], Phase.RUNNING)


def test_failure_at_the_source_leaves_the_request_at_the_destination() -> None:
    history = transferring()
    assert history.apply(lambda out: history.state.failed("w", 1, 9, out)) is False
    assert (history.commands, history.phase) == ([Drop("w", 1, 1)], Phase.TRANSFERRING)
    assert history.token("v", 2, 1) is AppendResult.STATE_CHANGED


@pytest.mark.parametrize("make", [yielded, waiting, transferring])
def test_failure_of_an_earlier_transfer_keeps_the_lease(
    make: Callable[[], RequestHistory],
) -> None:
    history = make()
    assert history.apply(lambda out: history.state.failed("w", 1, 8, out)) is False
    assert (history.commands, history.phase, history.state.lease) == ([], make().phase, LEASE)


def test_received_and_failed_of_old_attempts_and_epochs_change_nothing() -> None:
    history = transferring()
    assert history.apply(lambda out: history.state.received("v", 2, 8, out)) is False
    assert history.apply(lambda out: history.state.received("v", 1, 9, out)) is False
    assert history.apply(lambda out: history.state.failed("v", 1, 9, out)) is False
    assert history.phase is Phase.TRANSFERRING


def test_events_of_an_attempt_count_only_from_its_own_worker() -> None:
    history = running()
    assert history.apply(lambda out: history.state.rejected("x", 1, out)) is False
    history = transferring()
    assert history.apply(lambda out: history.state.failed("x", 1, 9, out)) is False
    assert history.apply(lambda out: history.state.failed("x", 2, 9, out)) is False
    assert history.apply(lambda out: history.state.failed("w", 7, 9, out)) is False
    assert (history.commands, history.phase) == ([], Phase.TRANSFERRING)


# ------------------------------------------------------------------ offers of old attempts


@pytest.mark.parametrize("phase", STATES)
def test_offers_of_an_old_attempt_are_dropped(phase: Phase) -> None:
    history = STATES[phase]()
    history.state.attempt += 10
    history.yielded("x", 7)
    assert (history.commands, history.phase) == ([Drop("x", 1, 7)], phase)
    history.ready("x", 7)
    assert (history.commands, history.phase) == ([Drop("x", 1, 7)], phase)


def test_ready_from_the_running_worker_is_ignored() -> None:
    history = transferring()
    history.apply(lambda out: history.state.received("v", 2, 9, out))
    history.ready()
    assert (history.commands, history.phase) == ([], Phase.RUNNING)


# ------------------------------------------------------------------ leases not used as a source


def test_lease_on_the_chosen_worker_is_dropped_and_serves_as_prefix_cache() -> None:
    history = yielded().place(W)
    assert history.commands == [Drop("w", 1, 1), submit("w", 2, (100,), None)]
    assert history.phase is Phase.RUNNING


def test_lease_of_another_layout_is_not_a_source() -> None:
    history = yielded().place(info_of("v", "decode", layout="other"))
    assert history.commands == [Drop("w", 1, 1), submit("v", 2, (100,), None)]


def test_empty_lease_is_not_kept() -> None:
    history = running().yielded(kv_len=0)
    assert (history.commands, history.phase) == ([], Phase.QUEUED)


# ------------------------------------------------------------------ draining: Submit, then Yield


def test_live_migration_submits_then_yields_then_transfers() -> None:
    history = migrating()
    assert history.commands == [submit("v", 2, (100,), Source("w", "1", 1, 3, "L"))]
    assert history.phase is Phase.RUNNING
    assert history.token("w", 1, 1) is AppendResult.APPENDED  # the request still runs on w
    history.ready()
    assert history.commands == [Yield("w", 1, 1)]
    history.ready()
    assert history.commands == []  # the Yield is not sent a second time
    assert history.token("w", 1, 2) is AppendResult.APPENDED
    history.yielded(kv_len=5)
    # The Submit to v lacks the latest tokens, so a new Submit follows this Drop.
    assert history.commands == [Drop("v", 1, 2)]
    assert history.state.decode_target == "v"
    history.place(V)
    assert history.commands == [submit("v", 3, (100, 101, 102), Source("w", "1", 1, 5, "L"))]
    history.ready(attempt=3)
    assert history.commands == [Send("w", 1, 1, AT, 3, 9, 2)]


@pytest.mark.parametrize("outcome", ["step", "failed", "given up"])
def test_migration_target_that_cannot_wait_is_dropped(outcome: str) -> None:
    history = migrating()
    state = history.state
    if outcome == "step":
        assert history.token("v", 2, 1) is AppendResult.MOVED
    elif outcome == "failed":
        assert history.apply(lambda out: state.failed("v", 2, 9, out)) is True
    else:
        assert history.apply(lambda out: state.aborted("v", 2, "nan", out)) is True
    assert (history.commands, history.phase) == ([Drop("v", 1, 2)], Phase.RUNNING)
    assert not state.can_migrate_live
    assert history.token("w", 1, 1) is AppendResult.APPENDED


def test_migration_target_may_reject_or_be_lost() -> None:
    history = migrating()
    assert history.apply(lambda out: history.state.rejected("v", 2, out)) is True
    assert (history.commands, history.phase, history.state.pending) == ([], Phase.RUNNING, None)
    history = migrating()
    assert history.apply(lambda out: history.state.worker_lost("v", out)) is False
    assert (history.commands, history.phase, history.state.pending) == ([], Phase.RUNNING, None)


@pytest.mark.parametrize("how", ["lost", "rejected", "gap", "finished"])
def test_migration_target_is_dropped_when_the_source_stops(how: str) -> None:
    history = migrating()
    state = history.state
    if how == "lost":
        history.apply(lambda out: state.worker_lost("w", out))
    elif how == "rejected":
        history.apply(lambda out: state.rejected("w", 1, out))
    elif how == "gap":
        history.apply(state.fail_attempt)
    else:
        history.token("w", 1, 1, Finish.LENGTH)
    assert Drop("v", 1, 2) in history.commands
    assert history.phase is (Phase.DONE if how == "finished" else Phase.QUEUED)
