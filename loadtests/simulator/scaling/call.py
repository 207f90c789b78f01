"""One request of a simulated load, and the client that records its times."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.simulator.world.clock import Clock
from penstock.router.routing import events as ev


@dataclass(slots=True)
class Call:
    """One request as its client sees it. Times are seconds of virtual time."""

    planned: Planned
    first: float = float("nan")  # time of the first token
    last: float = float("nan")
    num_tokens: int = 0
    status: str = ""  # final status, or "" while the request is running

    @property
    def ttft(self) -> float:
        return self.first - self.planned.due

    @property
    def tpot(self) -> float:
        """Seconds per token after the first one; 0 for an answer of one token."""
        return (self.last - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


class RecordingClient:
    """A client that records the times of one call."""

    def __init__(self, call: Call, clock: Clock, ended: Callable[[], None]) -> None:
        self._call = call
        self._clock = clock
        self._ended = ended

    def deliver(self, choice: int, position: int, token: int, finish: int) -> None:
        call, now = self._call, self._clock.now
        if not call.num_tokens:
            call.first = now
        call.last = now
        call.num_tokens += 1

    def deliver_run(self, position: int, num: int) -> None:
        self._call.last = self._clock.now
        self._call.num_tokens += num

    def deliver_end(self, end: ev.DeliverEnd) -> None:
        """Do nothing, because the end of a choice adds no token."""

    def deliver_cached(self, num_tokens: int) -> None:
        """Do nothing, because only times are recorded."""

    def on_choice_stopped(self, choice: int) -> None:
        """Do nothing, because this client never cuts an answer."""

    def end(self, end: ev.EndRequest) -> None:
        self._call.status = end.status.value
        self._ended()
