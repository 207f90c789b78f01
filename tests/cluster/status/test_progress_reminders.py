"""Progress is recorded per process; long stages are reported again until they end."""

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
    """`ProgressReminders` with a manual clock; records the reported events."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[StatusEvent] = []
        self.reminders = ProgressReminders(
            lambda title, notice: self.events.append(notice), lambda: self.now
        )

    def after(self, seconds: float) -> list[StatusEvent]:
        """Advance the clock second by second and return the reminders."""
        self.events.clear()
        for _ in range(round(seconds)):
            self.now += 1.0
            self.reminders.remind()
        return list(self.events)


def test_long_stage_is_reported_again_at_growing_intervals() -> None:
    recorder = Recorder()
    recorder.reminders(WHO, Progress("weights", 0, 16_000_000))
    recorder.reminders(WHO, Progress("weights", 4_000_000, 16_000_000))
    assert len(recorder.events) == 2, "progress is passed on at once"
    seconds = [each.seconds for each in recorder.after(300) if isinstance(each, Waiting)]
    assert seconds == [10, 20, 40, 80, 140, 200, 260]
    assert recorder.events[0] == Waiting("weights", 10.0, "4.0 of 16.0 MB")
    assert recorder.reminders.lines([WHO]) == [f"{WHO}: weights, 4.0 of 16.0 MB; 300 s so far"]
    assert recorder.reminders.lines(["prefill worker 0"]) == []


def test_each_stage_has_its_own_timer() -> None:
    recorder = Recorder()
    recorder.reminders(WHO, Progress("waiting for resources"))
    assert recorder.after(9) == []
    recorder.reminders(WHO, Progress("weights", 1_000_000, 2_000_000))
    assert recorder.after(9) == []
    recorder.reminders(WHO, Progress("warming up", 2_000_000, 2_000_000))
    assert recorder.after(10) == [Waiting("warming up", 10.0)], (
        "the detail of the previous stage is gone"
    )


def test_reminder_of_a_drain_has_its_latest_detail() -> None:
    recorder = Recorder()
    recorder.reminders(WHO, Progress("draining: fewer workers are enough"))
    recorder.reminders.set_detail(WHO, "5 sequences are left")
    recorder.reminders.set_detail("unknown worker", "ignored")
    (reminder,) = recorder.after(10)
    assert str(reminder) == "draining: fewer workers are enough, 5 sequences are left; 10 s so far"


def test_ready_dead_or_gone_process_gets_no_reminders() -> None:
    for end in (Ready(1.0), Died("its process died", 0.5), Progress("gone")):
        recorder = Recorder()
        recorder.reminders(WHO, Progress("loading libraries"))
        recorder.reminders(WHO, end)
        assert recorder.after(100) == []
        assert recorder.reminders.lines([WHO]) == []


@given(st.lists(st.floats(0.1, 200.0), min_size=1, max_size=50))
def test_reminder_intervals_stay_within_their_bounds(steps: list[float]) -> None:
    recorder = Recorder()
    recorder.reminders(WHO, Progress("loading libraries"))
    count, last = 0, recorder.now
    for step in steps:
        recorder.now += step
        recorder.events.clear()
        recorder.reminders.remind()
        assert len(recorder.events) <= 1
        if recorder.events:
            assert recorder.now - last >= FIRST_REMINDER_SECONDS
            count, last = count + 1, recorder.now
        assert recorder.now - last <= max(MAX_REMINDER_SECONDS, step)
    assert count or recorder.now - 100.0 < FIRST_REMINDER_SECONDS
