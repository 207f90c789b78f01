"""How a worker that died is replaced: at once, later, or much later, once it has been given up.

Pure: times come as arguments.
"""

from dataclasses import dataclass

STEADY_SECONDS = 60.0  # a worker that lived so long starts with a clean record
FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
MAX_FAILED_STARTS = 3  # in a row
FIRST_PAUSE = 60.0  # after a worker was given up
LONGEST_PAUSE = 900.0


@dataclass(slots=True)
class RestartBackoff:
    """The record of one worker's deaths."""

    deaths: int = 0  # in a row, each before it was steady
    failed_starts: int = 0  # in a row, each before it was ready

    def after_failed_start(self) -> float | None:
        """It died before it was ready: seconds to wait before the next try; None: give it up."""
        self.failed_starts += 1
        self.deaths += 1
        return None if self.failed_starts >= MAX_FAILED_STARTS else self._delay()

    def after_death(self, uptime: float) -> float:
        """It died `lived` seconds after it was ready: seconds to wait before it is replaced."""
        self.failed_starts = 0
        self.deaths = 0 if uptime >= STEADY_SECONDS else self.deaths + 1
        return self._delay()

    def _delay(self) -> float:
        # A first death costs no wait: its clients are waiting.
        if self.deaths <= 1:
            return 0.0
        return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(self.deaths - 2, 16))


@dataclass(slots=True)
class GiveUpBackoff:
    """The record of one place: how often in a row the worker in it was given up."""

    given_up: int = 0

    def after_giving_up(self, served: bool) -> float:
        """Seconds until the place may be filled again; `served`: whether the worker had before."""
        self.given_up = 1 if served else self.given_up + 1
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self.given_up - 1, 16))
