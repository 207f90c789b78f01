"""Delays before a dead process is restarted, and before a process that was given up is retried.

Pure code: times are arguments.
"""

from dataclasses import dataclass

STEADY_SECONDS = 60.0  # after this uptime, earlier deaths no longer count
FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
MAX_FAILED_STARTS = 3  # after this many failed starts in a row, the process is given up
FIRST_PAUSE = 60.0  # delay before a given-up process is retried; doubles each time
LONGEST_PAUSE = 900.0


@dataclass(slots=True)
class RestartBackoff:
    """Restart delays of one process, from its recent deaths."""

    deaths: int = 0  # consecutive deaths, each with an uptime below `STEADY_SECONDS`
    failed_starts: int = 0  # consecutive failed starts

    def after_failed_start(self) -> float | None:
        """Record a failed start; return the seconds until the next try, or None to give up."""
        self.failed_starts += 1
        self.deaths += 1
        return None if self.failed_starts >= MAX_FAILED_STARTS else self._delay()

    def after_death(self, uptime: float) -> float:
        """Record a process's death after `uptime` seconds of being ready; return the delay [s]."""
        self.failed_starts = 0
        self.deaths = 0 if uptime >= STEADY_SECONDS else self.deaths + 1
        return self._delay()

    def _delay(self) -> float:
        # Restart at once after a first death, because clients are waiting.
        if self.deaths <= 1:
            return 0.0
        return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(self.deaths - 2, 16))


@dataclass(slots=True)
class GiveUpBackoff:
    """Retry delays of a process that was given up, once or several times in a row."""

    given_up: int = 0

    def after_giving_up(self, served: bool) -> float:
        """Return the seconds until the next try; `served`: whether the process has ever served."""
        self.given_up = 1 if served else self.given_up + 1
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self.given_up - 1, 16))
