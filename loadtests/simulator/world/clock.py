"""Virtual time, and simulated processes that can be stopped, continued and killed."""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from typing import TypeAlias

Act: TypeAlias = Callable[[], None]


@contextmanager
def rare_collections() -> Iterator[None]:
    """Run the garbage collector less often within this context.

    A long run holds millions of small tuples. With Python's default thresholds, garbage collection
    takes a fifth of the run's time.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Clock:
    """A virtual clock with a heap of events. Events of equal time run in scheduling order."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._heap: list[tuple[float, int, Act]] = []
        self._num_scheduled = 0

    def at(self, time: float, act: Act) -> None:
        """Schedule `act` at `time`, or now if `time` has passed."""
        self._num_scheduled += 1
        due = time if time > self.now else self.now
        heappush(self._heap, (due, self._num_scheduled, act))

    def after(self, seconds: float, act: Act) -> None:
        """Schedule `act` after `seconds`."""
        self.at(self.now + seconds, act)

    @property
    def next(self) -> float:
        """Time of the next event, or infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    @property
    def num_events(self) -> int:
        """Number of events that have run."""
        return self._num_scheduled - len(self._heap)

    def step(self) -> None:
        """Advance to the next event and run it."""
        self.now, _, act = heappop(self._heap)
        act()

    def run(self, until: float) -> None:
        """Run all events up to and including the time `until`."""
        while self.next <= until:
            self.step()
        self.now = max(self.now, until)


def _undisturbed(time: float) -> None:
    """Do nothing. Used for processes that do not fast-forward."""


class Process:
    """A simulated process. Actions queue while it is stopped, and are lost when it is killed."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.clock = clock
        self.alive = True
        # Called with the arrival time before a message or signal arrives.
        # A process that has fast-forwarded past this time must then return to single steps.
        self.disturbed: Callable[[float], None] = _undisturbed
        self._stopped = False
        self._backlog: deque[Act] = deque()

    def after(self, seconds: float, act: Act) -> None:
        """Run `act` in this process after `seconds`, like a timer of the process."""
        self.clock.after(seconds, partial(self.take, act))

    def at(self, time: float, act: Act) -> None:
        """Run `act` in this process at `time`, like a timer of the process."""
        self.clock.at(time, partial(self.take, act))

    def take(self, act: Act) -> None:
        """Run `act` in this process now, or as soon as the stopped process continues."""
        if self._stopped:
            self._backlog.append(act)
        elif self.alive:
            act()

    def stop(self) -> None:
        """Stop the process, like SIGSTOP."""
        self.disturbed(self.clock.now)
        self._stopped = True

    def go_on(self) -> None:
        """Continue the process and run the queued actions, like SIGCONT."""
        self._stopped = False
        while self._backlog and not self._stopped:
            self.take(self._backlog.popleft())

    def kill(self) -> None:
        """Kill the process and drop its queued actions."""
        self.disturbed(self.clock.now)
        self.alive = False
        self._backlog.clear()
