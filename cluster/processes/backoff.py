"""Delays before a process that died is restarted, and before a given-up one is tried again.

Pure: times are arguments.
"""

from dataclasses import dataclass

STEADY_SECONDS = 60.0  # after this uptime earlier deaths no longer count
FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
MAX_FAILED_STARTS = 3  # in a row, before the process is given up
FIRST_PAUSE = 60.0  # before a given-up process is tried again; doubles each time
LONGEST_PAUSE = 900.0


@dataclass(slots=True)
class RestartBackoff:
    """Restart delays of one process, from its recent deaths."""

    deaths: int = 0  # in a row, each after less than `STEADY_SECONDS`
    failed_starts: int = 0  # in a row

    def after_failed_start(self) -> float | None:
        """Record a failed start; return the seconds until the next try, or None to give up."""
        self.failed_starts += 1
        self.deaths += 1
        return None if self.failed_starts >= MAX_FAILED_STARTS else self._delay()

    def after_death(self, uptime: float) -> float:
        """Record a death `uptime` seconds after it was ready; return the restart delay [s]."""
        self.failed_starts = 0
        self.deaths = 0 if uptime >= STEADY_SECONDS else self.deaths + 1
        return self._delay()

    def _delay(self) -> float:
        # Restart at once after a first death: clients are waiting.
        if self.deaths <= 1:
            return 0.0
        return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(self.deaths - 2, 16))


@dataclass(slots=True)
class GiveUpBackoff:
    """Retry delays of one process that was given up, possibly several times in a row."""

    given_up: int = 0

    def after_giving_up(self, served: bool) -> float:
        """Return the seconds until the next try; `served`: whether it has ever served."""
        self.given_up = 1 if served else self.given_up + 1
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self.given_up - 1, 16))
