"""Virtual time, and processes that live in it: they can stop, go on and die."""

import gc
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Act: TypeAlias = Callable[[], None]


@contextmanager
def rare_collections() -> Iterator[None]:
    """A long run holds millions of small tuples: to look for cycles among them as often as Python
    does by itself takes a fifth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Clock:
    """One heap of events; those of one moment happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._heap: list[tuple[float, int, Act]] = []
        self._num_scheduled = 0

    def at(self, time: float, act: Act) -> None:
        """Have that happen then, or now if then is past."""
        self._num_scheduled += 1
        heapq.heappush(self._heap, (max(time, self.now), self._num_scheduled, act))

    def after(self, seconds: float, act: Act) -> None:
        self.at(self.now + seconds, act)

    @property
    def next(self) -> float:
        """When something happens next; inf: never."""
        return self._heap[0][0] if self._heap else float("inf")

    @property
    def num_events(self) -> int:
        """That have happened."""
        return self._num_scheduled - len(self._heap)

    def step(self) -> None:
        """Let the next thing happen."""
        self.now, _, act = heapq.heappop(self._heap)
        act()

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        while self.next <= until:
            self.step()
        self.now = max(self.now, until)


def _undisturbed(time: float) -> None:
    """For processes that do one thing after the other anyway."""


class Process:
    """What happens to it while it is stopped waits; what happens to it once dead is lost."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.clock = clock
        self.alive = True
        # Told of what comes from outside, and when, before it comes: a message that is sent to it,
        # a signal. Who has run ahead of the clock's events catches up then.
        self.disturbed: Callable[[float], None] = _undisturbed
        self._stopped = False
        self._backlog: deque[Act] = deque()

    def after(self, seconds: float, act: Act) -> None:
        """A timer of its own."""
        self.clock.after(seconds, lambda: self.take(act))

    def at(self, time: float, act: Act) -> None:
        """A timer of its own."""
        self.clock.at(time, lambda: self.take(act))

    def take(self, act: Act) -> None:
        """Something happens to it: now, or once it goes on."""
        if self._stopped:
            self._backlog.append(act)
        elif self.alive:
            act()

    def stop(self) -> None:
        """As SIGSTOP does."""
        self.disturbed(self.clock.now)
        self._stopped = True

    def go_on(self) -> None:
        """As SIGCONT does."""
        self._stopped = False
        while self._backlog and not self._stopped:
            self.take(self._backlog.popleft())

    def kill(self) -> None:
        self.disturbed(self.clock.now)
        self.alive = False
        self._backlog.clear()
