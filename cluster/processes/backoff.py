"""Computes the delays before dead processes are restarted.

A process that fails to start several times in a row is given up. It is tried again after a longer
delay. This module reads no clock. The caller passes the times.
"""

from dataclasses import dataclass

# Once a process has been ready for this many seconds, earlier deaths do not increase the delay.
STEADY_SECONDS = 60.0
FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
MAX_FAILED_STARTS = 3  # after this many failed starts in a row, the process is given up
FIRST_PAUSE = 60.0  # Delay before a given-up process is tried again. It doubles each time.
LONGEST_PAUSE = 900.0


@dataclass(slots=True)
class RestartBackoff:
    """Computes the delays before one process is restarted, from its recent deaths."""

    # Number of deaths in a row. A failed start counts as a death. The death of a process that was
    # ready for at least `STEADY_SECONDS` resets the number to 0.
    deaths: int = 0
    failed_starts: int = 0  # number of failed starts in a row

    def after_failed_start(self) -> float | None:
        """Record a failed start. Return the seconds until the next start, or None to give up."""
        self.failed_starts += 1
        self.deaths += 1
        return None if self.failed_starts >= MAX_FAILED_STARTS else self._delay()

    def after_death(self, uptime: float) -> float:
        """Record the death of a process and return the seconds until its restart.

        Args:
            uptime: seconds for which the process was ready.
        """
        self.failed_starts = 0
        self.deaths = 0 if uptime >= STEADY_SECONDS else self.deaths + 1
        return self._delay()

    def _delay(self) -> float:
        # Restart immediately after the first death, because clients are waiting.
        if self.deaths <= 1:
            return 0.0
        return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(self.deaths - 2, 16))


@dataclass(slots=True)
class GiveUpBackoff:
    """Computes the delays before a process that was given up is started again."""

    given_up: int = 0

    def after_giving_up(self, served: bool) -> float:
        """Return the delay in seconds before the next start of a process that was given up.

        If the process has not served since the previous call, the delay doubles, up to
        `LONGEST_PAUSE`. Otherwise, it is `FIRST_PAUSE`.

        Args:
            served: whether the process has served since the previous call.
        """
        self.given_up = 1 if served else self.given_up + 1
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self.given_up - 1, 16))
