"""One test, or more, for each row of the table in docs/lifecycle.md."""

from collections.abc import Callable

import pytest

from penstock.router.routing import lifecycle
from penstock.router.routing.events import (
    Command,
    Deliver,
    Drop,
    End,
    Finish,
    Meeting,
    NewToken,
    Ready,
    Request,
    Send,
    Source,
    Status,
    Submit,
    Yield,
)
from penstock.router.routing.lifecycle import Life, Phase, phase_of
from penstock.router.routing.log import Taken
from tests.support.router_world import info_of

W, V, X = info_of("w", "prefill"), info_of("v", "decode"), info_of("x", "decode")
AT = Meeting("v", "1", "address", "secret")
PROMPT = [5, 6, 7]


class Story:
    """A life, told event by event; `out` holds what the last event gave."""

    def __init__(self, **request: object) -> None:
        fields: dict[str, object] = {"id": 1, "prompt": PROMPT, "params": None} | request
        self.life = Life(Request(**fields))  # type: ignore[arg-type]
        self.out: list[Command] = []

    def does(self, act: Callable[[list[Command]], object]) -> object:
        self.out = []
        result = act(self.out)
        if self.life.status is None:
            lifecycle.check(self.life)
        return result

    def place(self, info: object = W, yield_after: int = 0) -> "Story":
        self.does(lambda out: self.life.place(info, yield_after, out))  # type: ignore[arg-type]
        return self

    def token(
        self,
        worker: str,
        attempt: int,
        position: int,
        finish: Finish = Finish.NONE,
        choice: int = 0,
    ) -> object:
        token = NewToken(1, attempt, choice, position, 100 + position, finish)
        return self.does(lambda out: self.life.take(worker, token, out))

    def yielded(self, worker: str = "w", attempt: int = 1, kv_len: int = 3) -> "Story":
        self.does(lambda out: self.life.yielded(worker, attempt, kv_len, out))
        return self

    def ready(self, worker: str = "v", attempt: int = 2, epoch: int = 9) -> "Story":
        event = Ready(worker, 1, attempt, epoch, 2, AT)
        self.does(lambda out: self.life.ready(event, out))
        return self

    @property
    def phase(self) -> Phase:
        return phase_of(self.life)


def running() -> Story:
    story = Story().place(W, 1)
    story.token("w", 1, 0)
    return story


def yielded() -> Story:
    return running().yielded()


def waiting() -> Story:
    return yielded().place(V)


def moving() -> Story:
    return waiting().ready()


def asked() -> Story:
    """w drains, and v was asked to take over."""
    story = running()
    story.does(lambda out: story.life.ask(V, out))
    return story


STATES: dict[Phase, Callable[[], Story]] = {
    Phase.QUEUED: Story,
    Phase.RUNNING: running,
    Phase.YIELDED: yielded,
    Phase.WAITING: waiting,
    Phase.MOVING: moving,
}
HELD: dict[Phase, list[Command]] = {
    Phase.QUEUED: [],
    Phase.RUNNING: [Drop("w", 1, 1)],
    Phase.YIELDED: [Drop("w", 1, 1)],
    Phase.WAITING: [Drop("v", 1, 2), Drop("w", 1, 1)],
    Phase.MOVING: [Drop("v", 1, 2), Drop("w", 1, 1)],
}
LEASE = Source("w", "1", 1, 3, "L")


def submit(worker: str, attempt: int, log: tuple[int, ...], source: Source | None) -> Submit:
    request = Request(1, PROMPT, None)
    return Submit(worker, request, attempt, (log,), (False,), source, 0)


# ------------------------------------------------------------------ the straight road


@pytest.mark.parametrize("phase", STATES)
def test_states_are_what_they_are_called(phase: Phase) -> None:
    assert STATES[phase]().phase is phase


def test_the_way_of_a_request_through_prefill_and_decode() -> None:
    story = Story().place(W, 1)
    assert story.out == [Submit("w", story.life.request, 1, ((),), (False,), None, 1)]
    assert story.token("w", 1, 0) is Taken.TURN
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
    assert story.token("v", 2, 1) is Taken.TURN
    assert story.token("v", 2, 2) is Taken.PLAIN
    assert story.token("v", 2, 3, Finish.STOP) is Taken.TURN
    assert story.out == [
        Deliver(1, 0, 3, (103,), (None,), Finish.STOP),
        End(1, Status.OK, ""),
    ]


@pytest.mark.parametrize("make", [waiting, moving])
def test_a_step_from_the_next_worker_implies_that_it_runs(make: Callable[[], Story]) -> None:
    story = make()
    assert story.token("v", 2, 1) is Taken.TURN
    assert story.out == [Drop("w", 1, 1), Deliver(1, 0, 1, (101,), (None,), Finish.NONE)]
    assert story.phase is Phase.RUNNING


def test_a_finish_beats_a_yield() -> None:
    story = Story().place(W, 1)
    story.token("w", 1, 0, Finish.STOP)
    assert story.out[-1] == End(1, Status.OK, "")
    story.life.status = None  # even if it were still known, the late offer would be dropped
    story.out = []
    story.life.yielded("w", 1, 3, story.out)
    assert story.out == [Drop("w", 1, 1)]


# ------------------------------------------------------------------ Step


def test_known_positions_are_dropped() -> None:
    story = running()
    assert story.token("w", 1, 0) is Taken.NOTHING
    assert story.out == []
    assert story.life.log.answers == [[100]]


def test_a_gap_is_seen_and_fails_the_attempt() -> None:
    story = running()
    assert story.token("w", 1, 2) is Taken.GAP
    story.does(story.life.fail_attempt)
    assert story.out == [Drop("w", 1, 1)]
    assert story.phase is Phase.QUEUED
    story.place(V)
    assert story.out == [submit("v", 2, (100,), None)]


def test_a_choice_that_is_not_there_is_a_gap() -> None:
    assert running().token("w", 1, 1, choice=1) is Taken.GAP


def test_a_token_of_an_old_attempt_changes_nothing() -> None:
    story = running()
    story.does(lambda out: story.life.lost("w", out))
    story.place(W)
    assert story.token("w", 1, 1) is Taken.NOTHING
    assert story.out == []
    assert story.life.log.answers == [[100]]
    assert story.token("w", 2, 1) is Taken.TURN


def test_a_token_of_another_worker_changes_nothing() -> None:
    assert running().token("x", 1, 1) is Taken.NOTHING


def test_after_the_yield_nothing_comes_from_there() -> None:
    story = yielded()
    assert story.token("w", 1, 1) is Taken.NOTHING


# ------------------------------------------------------------------ client gone, deadline


@pytest.mark.parametrize("phase", STATES)
@pytest.mark.parametrize("status", [Status.CANCELLED, Status.DEADLINE])
def test_an_end_drops_everywhere(phase: Phase, status: Status) -> None:
    story = STATES[phase]()
    story.does(lambda out: story.life.end(status, "why", out))
    assert story.out == [*HELD[phase], End(1, status, "why")]
    assert story.phase is Phase.DONE


# ------------------------------------------------------------------ Cut


@pytest.mark.parametrize("phase", [phase for phase in STATES if phase is not Phase.QUEUED])
def test_a_stop_string_cuts_the_log_and_ends(phase: Phase) -> None:
    story = STATES[phase]()
    story.does(lambda out: story.life.cut(0, 0, out))
    assert story.out == [*HELD[phase], End(1, Status.OK, "")]
    assert story.life.log.answers == [[]]


def test_a_cut_choice_is_dropped_and_the_others_go_on() -> None:
    story = Story(num_choices=2).place()
    story.token("w", 1, 0)
    story.token("w", 1, 0, choice=1)
    story.does(lambda out: story.life.cut(0, 0, out))
    assert story.out == [Drop("w", 1, 1, 0)]
    assert story.token("w", 1, 1) is Taken.NOTHING
    story.does(lambda out: story.life.lost("w", out))
    story.place(V)
    request = story.life.request
    assert story.out == [Submit("v", request, 2, ((), (100,)), (True, False), None, 0)]
    assert story.token("v", 2, 1, Finish.LENGTH, choice=1) is Taken.TURN
    assert story.out[-1] == End(1, Status.OK, "")


def test_a_cut_of_no_choice_changes_nothing() -> None:
    story = running()
    story.does(lambda out: story.life.cut(1, 0, out))
    assert (story.out, story.phase) == ([], Phase.RUNNING)


def test_a_cut_that_comes_after_the_finish_changes_nothing() -> None:
    story = Story(num_choices=2).place()
    story.token("w", 1, 0, Finish.STOP)
    story.does(lambda out: story.life.cut(0, 0, out))
    assert story.out == []
    assert story.life.log.answers == [[100], []]


# ------------------------------------------------------------------ Rejected


def test_rejected_while_running_is_placed_elsewhere() -> None:
    story = Story().place(W, 1)
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
def test_the_next_worker_may_yield_before_it_said_anything(make: Callable[[], Story]) -> None:
    story = make().yielded("v", 2)
    assert (story.out, story.phase) == ([Drop("w", 1, 1)], Phase.YIELDED)
    story.place(X)
    assert story.out == [submit("x", 3, (100,), Source("v", "1", 2, 3, "L"))]


def test_rejected_of_an_old_attempt_changes_nothing() -> None:
    story = moving()
    assert story.does(lambda out: story.life.rejected("v", 1, out)) is False
    assert story.phase is Phase.MOVING


# ------------------------------------------------------------------ workers lost


def test_a_running_worker_lost_means_the_next_attempt_with_the_log() -> None:
    story = running()
    assert story.does(lambda out: story.life.lost("w", out)) is True
    assert (story.out, story.phase) == ([], Phase.QUEUED)
    story.place(V)
    assert story.out == [submit("v", 2, (100,), None)]


def test_two_workers_lost_while_they_ran_it_end_it() -> None:
    story = running()
    story.does(lambda out: story.life.lost("w", out))
    story.place(V)
    assert story.does(lambda out: story.life.lost("v", out)) is True
    (end,) = story.out
    assert isinstance(end, End)
    assert end.status is Status.INTERNAL


def test_workers_lost_that_did_not_run_it_do_not_count() -> None:
    story = waiting()
    for worker in (V, X, V, X):
        assert story.does(lambda out, w=worker: story.life.lost(w.worker, out)) is False  # type: ignore[misc]
        assert story.phase is Phase.YIELDED
        story.place(X if worker is V else V)
    assert story.life.num_losses == 0


@pytest.mark.parametrize("make", [waiting, moving])
def test_the_destination_lost_keeps_the_lease_as_source(make: Callable[[], Story]) -> None:
    story = make()
    story.does(lambda out: story.life.lost("v", out))
    assert (story.out, story.phase) == ([], Phase.YIELDED)
    story.place(X)
    assert story.out == [submit("x", 3, (100,), LEASE)]


@pytest.mark.parametrize("make", [waiting, moving])
def test_the_source_lost_means_nothing_to_do(make: Callable[[], Story]) -> None:
    story = make()
    assert story.does(lambda out: story.life.lost("w", out)) is False
    assert (story.out, story.phase) == ([], make().phase)
    assert story.token("v", 2, 1) is Taken.TURN
    assert story.phase is Phase.RUNNING


def test_the_source_lost_before_anybody_was_to_have_it() -> None:
    story = yielded()
    assert story.does(lambda out: story.life.lost("w", out)) is False
    assert story.phase is Phase.QUEUED
    story.place(X)
    assert story.out == [submit("x", 2, (100,), None)]


def test_ready_for_a_source_that_is_lost_begins_again_there_without() -> None:
    story = waiting()
    story.does(lambda out: story.life.lost("w", out))
    story.ready()
    assert story.out == [Drop("v", 1, 2), submit("v", 3, (100,), None)]
    assert story.phase is Phase.RUNNING


# ------------------------------------------------------------------ Failed


@pytest.mark.parametrize("make", [waiting, moving])
def test_failed_at_the_destination_which_computes_them(make: Callable[[], Story]) -> None:
    story = make()
    assert story.does(lambda out: story.life.failed("v", 2, out)) is True
    assert (story.out, story.phase) == ([Drop("w", 1, 1)], Phase.RUNNING)


def test_failed_at_the_source_leaves_it_to_the_destination() -> None:
    story = moving()
    assert story.does(lambda out: story.life.failed("w", 1, out)) is False
    assert (story.out, story.phase) == ([Drop("w", 1, 1)], Phase.MOVING)
    assert story.token("v", 2, 1) is Taken.TURN


def test_received_and_failed_of_old_attempts_and_epochs_change_nothing() -> None:
    story = moving()
    assert story.does(lambda out: story.life.received("v", 2, 8, out)) is False
    assert story.does(lambda out: story.life.received("v", 1, 9, out)) is False
    assert story.does(lambda out: story.life.failed("v", 1, out)) is False
    assert story.phase is Phase.MOVING


def test_only_its_own_worker_speaks_for_an_attempt() -> None:
    story = running()
    assert story.does(lambda out: story.life.rejected("x", 1, out)) is False
    story = moving()
    assert story.does(lambda out: story.life.failed("x", 1, out)) is False
    assert story.does(lambda out: story.life.failed("x", 2, out)) is False
    assert story.does(lambda out: story.life.failed("w", 7, out)) is False
    assert (story.out, story.phase) == ([], Phase.MOVING)


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
    assert story.token("w", 1, 1) is Taken.PLAIN  # w runs on
    story.ready()
    assert story.out == [Yield("w", 1, 1)]
    story.ready()
    assert story.out == []  # asked once
    assert story.token("w", 1, 2) is Taken.PLAIN
    story.yielded(kv_len=5)
    assert story.out == [Drop("v", 1, 2)]  # it knows too few tokens
    assert story.life.then == "v"
    story.place(V)
    assert story.out == [submit("v", 3, (100, 101, 102), Source("w", "1", 1, 5, "L"))]
    story.ready(attempt=3)
    assert story.out == [Send("w", 1, 1, AT, 3, 9, 2)]


@pytest.mark.parametrize("answer", ["step", "failed", "given up"])
def test_who_was_asked_and_cannot_wait_is_let_go(answer: str) -> None:
    story = asked()
    life = story.life
    if answer == "step":
        assert story.token("v", 2, 1) is Taken.MOVED
    elif answer == "failed":
        assert story.does(lambda out: life.failed("v", 2, out)) is True
    else:
        assert story.does(lambda out: life.given_up("v", 2, "nan", out)) is True
    assert (story.out, story.phase) == ([Drop("v", 1, 2)], Phase.RUNNING)
    assert not life.askable
    assert story.token("w", 1, 1) is Taken.PLAIN


def test_who_was_asked_may_reject_or_be_lost() -> None:
    story = asked()
    assert story.does(lambda out: story.life.rejected("v", 2, out)) is True
    assert (story.out, story.phase, story.life.next) == ([], Phase.RUNNING, None)
    story = asked()
    assert story.does(lambda out: story.life.lost("v", out)) is False
    assert (story.out, story.phase, story.life.next) == ([], Phase.RUNNING, None)


@pytest.mark.parametrize("how", ["lost", "rejected", "gap", "finished"])
def test_who_was_asked_is_let_go_when_the_other_one_stops(how: str) -> None:
    story = asked()
    life = story.life
    if how == "lost":
        story.does(lambda out: life.lost("w", out))
    elif how == "rejected":
        story.does(lambda out: life.rejected("w", 1, out))
    elif how == "gap":
        story.does(life.fail_attempt)
    else:
        story.token("w", 1, 1, Finish.LENGTH)
    assert Drop("v", 1, 2) in story.out
    assert story.phase is (Phase.DONE if how == "finished" else Phase.QUEUED)


# ------------------------------------------------------------------ given up


@pytest.mark.parametrize(("make", "name"), [(running, ("w", 1)), (moving, ("v", 2))])
def test_an_error_of_the_workers_ends_it(make: Callable[[], Story], name: tuple[str, int]) -> None:
    story = make()
    assert story.does(lambda out: story.life.given_up(*name, "not finite", out)) is True
    assert story.out[-1] == End(1, Status.INTERNAL, "not finite")


def test_an_error_of_an_old_attempt_changes_nothing() -> None:
    story = moving()
    assert story.does(lambda out: story.life.given_up("w", 1, "not finite", out)) is False
    assert (story.out, story.phase) == ([], Phase.MOVING)


# ------------------------------------------------------------------ a log from before


def test_a_log_that_the_client_brought_is_gone_on_from() -> None:
    story = Story(log=[[8, 9]], max_tokens=3).place()
    assert story.out == [Submit("w", story.life.request, 1, ((8, 9),), (False,), None, 0)]
    assert story.life.log.num_left == 1
    assert story.token("w", 1, 1) is Taken.NOTHING
    assert story.token("w", 1, 2, Finish.LENGTH) is Taken.TURN
    assert story.out[0] == Deliver(1, 0, 2, (102,), (None,), Finish.LENGTH)
