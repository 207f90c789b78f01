"""Reports processes that stay too long in one stage of starting or stopping."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from penstock.cluster.status.status_events import (
    Died,
    GivenUp,
    Progress,
    Ready,
    Report,
    StatusEvent,
    Waiting,
)

FIRST_REMINDER_SECONDS = 10.0
MAX_REMINDER_SECONDS = 60.0
"""A wait is reported after 10 s, 20 s, 40 s and 80 s, and then once a minute."""
GONE = "gone"
MB = 1e6


@dataclass(slots=True)
class _Wait:
    stage: str
    since: float
    remind_at: float
    detail: str = ""


class ProgressReminders:
    """Forwards status events, and reports a process again if it stays long in one stage.

    Args:
        report: receives all events, and the reminders of long waits.
        now: returns the time of a monotonic clock, in seconds.
    """

    def __init__(self, report: Report, now: Callable[[], float]) -> None:
        self._report = report
        self._now = now
        self._waits: dict[str, _Wait] = {}

    def __call__(self, title: str, event: StatusEvent) -> None:
        match event:
            case Progress(stage, done, total) if stage != GONE:
                self._on_progress(title, stage, done, total)
            case Ready() | Died() | GivenUp() | Progress():
                self._waits.pop(title, None)
        self._report(title, event)

    def set_detail(self, title: str, detail: str) -> None:
        """Set the detail that reminders about a process show, such as the work that is left."""
        if title in self._waits:
            self._waits[title].detail = detail

    def remind(self) -> None:
        """Report each wait whose next reminder is due. Call this about once per second."""
        now = self._now()
        for title, wait in self._waits.items():
            if now >= wait.remind_at:
                waited = now - wait.since
                wait.remind_at = now + min(
                    max(waited, FIRST_REMINDER_SECONDS), MAX_REMINDER_SECONDS
                )
                self._report(title, Waiting(wait.stage, waited, wait.detail))

    def lines(self, titles: Collection[str]) -> list[str]:
        """Return a line of text for each waiting process in `titles`, sorted by title."""
        now = self._now()
        return [
            f"{title}: {Waiting(wait.stage, now - wait.since, wait.detail)}"
            for title, wait in sorted(self._waits.items())
            if title in titles
        ]

    def _on_progress(self, title: str, stage: str, done: int, total: int) -> None:
        wait = self._waits.get(title)
        if wait is None or wait.stage != stage:
            now = self._now()
            wait = self._waits[title] = _Wait(stage, now, now + FIRST_REMINDER_SECONDS)
        if done < total:
            wait.detail = f"{done / MB:.1f} of {total / MB:.1f} MB"
