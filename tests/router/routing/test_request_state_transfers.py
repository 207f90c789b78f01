"""One test, or more, for each row of the table in docs/lifecycle.md: KV transfers, losses,
drains."""

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
    asked,
    moving,
    running,
    submit,
    waiting,
    yielded,
)
from tests.support.router_world import info_of

# ------------------------------------------------------------------ Rejected


def test_rejected_while_running_is_placed_elsewhere() -> None:
    story = RequestHistory().place(W, 1)
    assert story.does(lambda out: story.life.rejected("w", 1, out)) is True
    assert (story.out, story.phase) == ([], Phase.QUEUED)
    story.place(V)
    assert story.out == [submit("v", 2, (), None)]


def test_rejected_while_waiting_keeps_the_lease_as_source() -> None:
    story = waiting()
    assert story.does(lambda out: story.life.rejected("v", 2, out)) is True
    assert (story.out, story.phase) == ([], Phase.YIELDED)
    story.place(X)
    assert story.out == [submit("x", 3, (100,), LEASE)]


@pytest.mark.parametrize("make", [waiting, moving])
def test_the_next_worker_may_yield_before_it_said_anything(
    make: Callable[[], RequestHistory],
) -> None:
    story = make().yielded("v", 2)
    assert (story.out, story.phase) == ([Drop("w", 1, 1)], Phase.YIELDED)
    story.place(X)
    assert story.out == [submit("x", 3, (100,), Source("v", "1", 2, 3, "L"))]


def test_rejected_of_an_old_attempt_changes_nothing() -> None:
    story = moving()
    assert story.does(lambda out: story.life.rejected("v", 1, out)) is False
    assert story.phase is Phase.TRANSFERRING


# ------------------------------------------------------------------ workers lost


def test_a_running_worker_lost_means_the_next_attempt_with_the_log() -> None:
    story = running()
    assert story.does(lambda out: story.life.worker_lost("w", out)) is True
    assert (story.out, story.phase) == ([], Phase.QUEUED)
    story.place(V)
    assert story.out == [submit("v", 2, (100,), None)]


def test_two_workers_lost_while_they_ran_it_end_it() -> None:
    story = running()
    story.does(lambda out: story.life.worker_lost("w", out))
    story.place(V)
    assert story.does(lambda out: story.life.worker_lost("v", out)) is True
    (end,) = story.out
    assert isinstance(end, EndRequest)
    assert end.status is Status.INTERNAL


def test_workers_lost_that_did_not_run_it_do_not_count() -> None:
    story = waiting()
    for worker in (V, X, V, X):
        assert story.does(lambda out, w=worker: story.life.worker_lost(w.worker, out)) is False  # type: ignore[misc]
        assert story.phase is Phase.YIELDED
        story.place(X if worker is V else V)
    assert story.life.num_losses == 0


@pytest.mark.parametrize("make", [waiting, moving])
def test_the_destination_lost_keeps_the_lease_as_source(make: Callable[[], RequestHistory]) -> None:
    story = make()
    story.does(lambda out: story.life.worker_lost("v", out))
    assert (story.out, story.phase) == ([], Phase.YIELDED)
    story.place(X)
    assert story.out == [submit("x", 3, (100,), LEASE)]


@pytest.mark.parametrize("make", [waiting, moving])
def test_the_source_lost_means_nothing_to_do(make: Callable[[], RequestHistory]) -> None:
    story = make()
    assert story.does(lambda out: story.life.worker_lost("w", out)) is False
    assert (story.out, story.phase) == ([], make().phase)
    assert story.token("v", 2, 1) is AppendResult.STATE_CHANGED
    assert story.phase is Phase.RUNNING


@pytest.mark.parametrize(
    "goes",
    [lambda life, out: life.worker_lost("w", out), lambda life, out: life.failed("w", 1, out)],
)
def test_blocks_whose_source_is_gone_are_waited_for_for_two_looks(
    goes: Callable[[RequestState, list[Command]], bool],
) -> None:
    story = moving()
    assert story.does(story.life.check_source) is False, "its source is there"
    story.does(lambda out: goes(story.life, out))
    assert story.does(story.life.check_source) is False
    assert (story.out, story.phase) == ([], Phase.TRANSFERRING)
    assert story.does(story.life.check_source) is True
    assert story.out == [Drop("v", 1, 2), submit("v", 3, (100,), None)]
    assert story.phase is Phase.RUNNING
    assert story.does(story.life.check_source) is False


@pytest.mark.parametrize("make", [running, yielded, waiting])
def test_where_no_blocks_are_on_their_way_nothing_is_given_up(
    make: Callable[[], RequestHistory],
) -> None:
    story = make()
    story.does(lambda out: story.life.worker_lost("w", out))
    phase = story.phase
    for _ in range(3):
        assert story.does(story.life.check_source) is False
    assert (story.out, story.phase) == ([], phase)


def test_the_source_lost_before_anybody_was_to_have_it() -> None:
    story = yielded()
    assert story.does(lambda out: story.life.worker_lost("w", out)) is False
    assert story.phase is Phase.QUEUED
    story.place(X)
    assert story.out == [submit("x", 2, (100,), None)]


def test_ready_for_a_source_that_is_lost_begins_again_there_without() -> None:
    story = waiting()
    story.does(lambda out: story.life.worker_lost("w", out))
    story.ready()
    assert story.out == [Drop("v", 1, 2), submit("v", 3, (100,), None)]
    assert story.phase is Phase.RUNNING


# ------------------------------------------------------------------ Failed


@pytest.mark.parametrize("make", [waiting, moving])
def test_failed_at_the_destination_which_computes_them(make: Callable[[], RequestHistory]) -> None:
    story = make()
    assert story.does(lambda out: story.life.failed("v", 2, out)) is True
    assert (story.out, story.phase) == ([Drop("w", 1, 1)], Phase.RUNNING)


def test_failed_at_the_source_leaves_it_to_the_destination() -> None:
    story = moving()
    assert story.does(lambda out: story.life.failed("w", 1, out)) is False
    assert (story.out, story.phase) == ([Drop("w", 1, 1)], Phase.TRANSFERRING)
    assert story.token("v", 2, 1) is AppendResult.STATE_CHANGED


def test_received_and_failed_of_old_attempts_and_epochs_change_nothing() -> None:
    story = moving()
    assert story.does(lambda out: story.life.received("v", 2, 8, out)) is False
    assert story.does(lambda out: story.life.received("v", 1, 9, out)) is False
    assert story.does(lambda out: story.life.failed("v", 1, out)) is False
    assert story.phase is Phase.TRANSFERRING


def test_only_its_own_worker_speaks_for_an_attempt() -> None:
    story = running()
    assert story.does(lambda out: story.life.rejected("x", 1, out)) is False
    story = moving()
    assert story.does(lambda out: story.life.failed("x", 1, out)) is False
    assert story.does(lambda out: story.life.failed("x", 2, out)) is False
    assert story.does(lambda out: story.life.failed("w", 7, out)) is False
    assert (story.out, story.phase) == ([], Phase.TRANSFERRING)


# ------------------------------------------------------------------ old offers


@pytest.mark.parametrize("phase", STATES)
def test_what_an_old_attempt_offers_is_dropped(phase: Phase) -> None:
    story = STATES[phase]()
    story.life.attempt += 10
    story.yielded("x", 7)
    assert (story.out, story.phase) == ([Drop("x", 1, 7)], phase)
    story.ready("x", 7)
    assert (story.out, story.phase) == ([Drop("x", 1, 7)], phase)


def test_ready_from_the_worker_that_runs_it_is_no_offer() -> None:
    story = moving()
    story.does(lambda out: story.life.received("v", 2, 9, out))
    story.ready()
    assert (story.out, story.phase) == ([], Phase.RUNNING)


# ------------------------------------------------------------------ leases that are of no use


def test_a_lease_serves_as_cache_where_it_lies() -> None:
    story = yielded().place(W)
    assert story.out == [Drop("w", 1, 1), submit("w", 2, (100,), None)]
    assert story.phase is Phase.RUNNING


def test_a_lease_of_another_layout_is_no_source() -> None:
    story = yielded().place(info_of("v", "decode", layout="other"))
    assert story.out == [Drop("w", 1, 1), submit("v", 2, (100,), None)]


def test_an_empty_lease_is_none() -> None:
    story = running().yielded(kv_len=0)
    assert (story.out, story.phase) == ([], Phase.QUEUED)


# ------------------------------------------------------------------ draining: the turned order


def test_asked_first_then_yielded_then_moved() -> None:
    story = asked()
    assert story.out == [submit("v", 2, (100,), Source("w", "1", 1, 3, "L"))]
    assert story.phase is Phase.RUNNING
    assert story.token("w", 1, 1) is AppendResult.APPENDED  # w runs on
    story.ready()
    assert story.out == [Yield("w", 1, 1)]
    story.ready()
    assert story.out == []  # asked once
    assert story.token("w", 1, 2) is AppendResult.APPENDED
    story.yielded(kv_len=5)
    assert story.out == [Drop("v", 1, 2)]  # it knows too few tokens
    assert story.life.decode_target == "v"
    story.place(V)
    assert story.out == [submit("v", 3, (100, 101, 102), Source("w", "1", 1, 5, "L"))]
    story.ready(attempt=3)
    assert story.out == [Send("w", 1, 1, AT, 3, 9, 2)]


@pytest.mark.parametrize("answer", ["step", "failed", "given up"])
def test_who_was_asked_and_cannot_wait_is_let_go(answer: str) -> None:
    story = asked()
    life = story.life
    if answer == "step":
        assert story.token("v", 2, 1) is AppendResult.MOVED
    elif answer == "failed":
        assert story.does(lambda out: life.failed("v", 2, out)) is True
    else:
        assert story.does(lambda out: life.aborted("v", 2, "nan", out)) is True
    assert (story.out, story.phase) == ([Drop("v", 1, 2)], Phase.RUNNING)
    assert not life.can_migrate_live
    assert story.token("w", 1, 1) is AppendResult.APPENDED


def test_who_was_asked_may_reject_or_be_lost() -> None:
    story = asked()
    assert story.does(lambda out: story.life.rejected("v", 2, out)) is True
    assert (story.out, story.phase, story.life.pending) == ([], Phase.RUNNING, None)
    story = asked()
    assert story.does(lambda out: story.life.worker_lost("v", out)) is False
    assert (story.out, story.phase, story.life.pending) == ([], Phase.RUNNING, None)


@pytest.mark.parametrize("how", ["lost", "rejected", "gap", "finished"])
def test_who_was_asked_is_let_go_when_the_other_one_stops(how: str) -> None:
    story = asked()
    life = story.life
    if how == "lost":
        story.does(lambda out: life.worker_lost("w", out))
    elif how == "rejected":
        story.does(lambda out: life.rejected("w", 1, out))
    elif how == "gap":
        story.does(life.fail_attempt)
    else:
        story.token("w", 1, 1, Finish.LENGTH)
    assert Drop("v", 1, 2) in story.out
    assert story.phase is (Phase.DONE if how == "finished" else Phase.QUEUED)
