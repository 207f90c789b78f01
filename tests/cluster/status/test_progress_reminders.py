"""Who waits for what: remembered, told again when it takes long, forgotten when it is over."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.status.progress_reminders import (
    FIRST_REMINDER_SECONDS,
    MAX_REMINDER_SECONDS,
    ProgressReminders,
)
from penstock.cluster.status.status_events import Died, Progress, Ready, StatusEvent, Waiting

WHO = "decode worker 0"


class Recorder:
    """Waits with a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[StatusEvent] = []
        self.waits = ProgressReminders(
            lambda title, notice: self.events.append(notice), lambda: self.now
        )

    def after(self, seconds: float) -> list[StatusEvent]:
        """What is told in so many seconds, looked at each second."""
        self.events.clear()
        for _ in range(round(seconds)):
            self.now += 1.0
            self.waits.remind()
        return list(self.events)


def test_a_long_wait_is_told_again_ever_less_often() -> None:
    watch = Recorder()
    watch.waits(WHO, Progress("weights", 0, 16_000_000))
    watch.waits(WHO, Progress("weights", 4_000_000, 16_000_000))
    assert len(watch.events) == 2, "passed on"
    seconds = [each.seconds for each in watch.after(300) if isinstance(each, Waiting)]
    assert seconds == [10, 20, 40, 80, 140, 200, 260]
    assert watch.events[0] == Waiting("weights", 10.0, "4.0 of 16.0 MB")
    assert watch.waits.lines([WHO]) == [f"{WHO}: weights, 4.0 of 16.0 MB; 300 s so far"]
    assert watch.waits.lines(["prefill worker 0"]) == []


def test_each_stage_has_a_time_of_its_own() -> None:
    watch = Recorder()
    watch.waits(WHO, Progress("waiting for its place"))
    assert watch.after(9) == []
    watch.waits(WHO, Progress("weights", 1_000_000, 2_000_000))
    assert watch.after(9) == []
    watch.waits(WHO, Progress("warming up", 2_000_000, 2_000_000))
    assert watch.after(10) == [Waiting("warming up", 10.0)], "nothing of the stage before"


def test_a_drain_says_what_is_left() -> None:
    watch = Recorder()
    watch.waits(WHO, Progress("draining: fewer workers are enough"))
    watch.waits.set_detail(WHO, "5 sequences are there still")
    watch.waits.set_detail("nobody", "who is not known")
    (said,) = watch.after(10)
    assert str(said) == (
        "draining: fewer workers are enough, 5 sequences are there still; 10 s so far"
    )


def test_who_is_ready_dead_or_gone_waits_no_more() -> None:
    for end in (Ready(1.0), Died("its process died", 0.5), Progress("gone")):
        watch = Recorder()
        watch.waits(WHO, Progress("loading libraries"))
        watch.waits(WHO, end)
        assert watch.after(100) == []
        assert watch.waits.lines([WHO]) == []


@given(st.lists(st.floats(0.1, 200.0), min_size=1, max_size=50))
def test_reminders_are_neither_missing_nor_many(steps: list[float]) -> None:
    watch = Recorder()
    watch.waits(WHO, Progress("loading libraries"))
    told, last = 0, watch.now
    for step in steps:
        watch.now += step
        watch.events.clear()
        watch.waits.remind()
        assert len(watch.events) <= 1
        if watch.events:
            assert watch.now - last >= FIRST_REMINDER_SECONDS
            told, last = told + 1, watch.now
        assert watch.now - last <= max(MAX_REMINDER_SECONDS, step)
    assert told or watch.now - 100.0 < FIRST_REMINDER_SECONDS
