"""Sees that a process stands still, writes down where, and ends it: that one only.

Whoever does something that must come to an end has a pulse; a thread looks at all of them. What is
late is told with a bundle (see `bundle`), then the process ends with `EXIT_HUNG`. A process that is
stopped, or whose interpreter lock is held for ever, cannot see itself: its silence tells others.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.workers.health.crash_dump import write_crash_dump

log = logging.getLogger(__name__)

EXIT_HUNG = 86
"""The exit code of a process that its watchdog has ended."""

HANG_FACTOR = 5.0
"""A step may take so many times what the longest of late took."""

WRITE_SECONDS = 5.0  # the bundle: its folder may hang too
NOTIFY_SECONDS = 1.0
_NUM_CHECKS = 10  # in the shortest bound


class ProgressTimer:
    """One thing that comes to an end again and again while there is any of it.

    Kept by whoever does it, from one thread; read by the watchdog's. `floor`: seconds that it may
    take, however short it has been before.
    """

    def __init__(self, name: str, floor: float) -> None:
        self.name = name
        self._floor = floor
        self._predicted = 0.0
        self._since: float | None = None  # None: nothing is due

    def begin(self) -> None:
        """Something is due from now on, if nothing was before."""
        if self._since is None:
            self._since = time.monotonic()

    def progressed(self, predicted: float = 0.0) -> None:
        """What was due has come, and the next of it is due; it takes about so many seconds."""
        self._predicted = predicted
        self._since = time.monotonic()

    def idle(self) -> None:
        """Nothing is due."""
        self._since = None

    @property
    def bound(self) -> float:
        """Seconds."""
        return max(self._floor, HANG_FACTOR * self._predicted)

    def extend(self, seconds: float) -> None:
        """It could not go on for so long, as nothing here could."""
        if self._since is not None:
            self._since += seconds

    def waited(self, now: float) -> float:
        """Seconds since something was due; 0 if nothing is."""
        since = self._since
        return 0.0 if since is None else now - since


def _no_state() -> Mapping[str, Any]:
    return {}


class Watchdog:
    """Watches from `start` until `stop`.

    Args:
        name: of whom it watches, for the bundle.
        seconds: that anything may take.
        folder: of the crash dumps; None: one of its own in the folder for temporary files.
        tell: told why, in one line, just before the end; called in the watchdog's thread.
        end: ends the process; given the exit code.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        folder: Path | None = None,
        notify: Callable[[str], object] = log.critical,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.state_source: Callable[[], Mapping[str, Any]] = (
            _no_state  # for the bundle: who works on what
        )
        self._name = name
        self._seconds = seconds
        self._folder = folder
        self._notify = notify
        self._exit = end
        self._timers: list[ProgressTimer] = []
        self._event_loop_task: asyncio.Task[None] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def timer(self, name: str) -> ProgressTimer:
        """A new one, for who does that."""
        pulse = ProgressTimer(name, self._seconds)
        self._timers.append(pulse)
        return pulse

    def start(self) -> None:
        """From now on; on the event loop, which it watches too."""
        self._event_loop_task = asyncio.create_task(
            self._report_progress(self.timer("the event loop"))
        )
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._event_loop_task is not None:
            self._event_loop_task.cancel()

    async def _report_progress(self, pulse: ProgressTimer) -> None:
        while True:
            pulse.progressed()
            await asyncio.sleep(self._seconds / _NUM_CHECKS)

    # ------------------------------------------------------------ its own thread

    def _watch(self) -> None:
        pause = self._seconds / _NUM_CHECKS
        looked = time.monotonic()
        while not self._stopping.wait(pause):
            now = time.monotonic()
            slept, looked = now - looked - pause, now
            if slept > pause:  # the process was stopped, or has no share of the machine
                for pulse in self._timers:
                    pulse.extend(slept)
            late = [pulse for pulse in self._timers if pulse.waited(now) > pulse.bound]
            if late:
                self._report_and_exit(late[0], now)
                return

    def _report_and_exit(self, late: ProgressTimer, now: float) -> None:
        why = f"{late.name} has not moved for {late.waited(now):.1f} s"
        bundle = self._write(why, late)
        where = "no bundle could be written" if bundle is None else f"see {bundle}"
        reason = f"it hung: {why} ({where})"
        log.critical("%s: %s", self._name, reason)
        self._notify(reason)
        self._stopping.wait(NOTIFY_SECONDS)
        self._exit(EXIT_HUNG)

    def _write(self, why: str, late: ProgressTimer) -> Path | None:
        """The bundle, unless its folder takes too long or refuses."""
        written: list[Path] = []

        def write() -> None:
            facts = {"why": why, "bound_seconds": late.bound, "pulses": self._facts()}
            try:
                written.append(write_crash_dump(self._folder, self._name, facts, self.state_source))
            except OSError as error:
                log.error("no bundle: %s", error)

        thread = threading.Thread(target=write, name="bundle", daemon=True)
        thread.start()
        thread.join(WRITE_SECONDS)
        return written[0] if written else None

    def _facts(self) -> dict[str, float]:
        now = time.monotonic()
        return {pulse.name: round(pulse.waited(now), 3) for pulse in self._timers}
