"""Watchdog: detects that its process hangs, writes a crash dump and ends the process.

Each activity that must make progress has a `ProgressTimer`, and a thread checks all timers. If a
timer is late, the thread writes a crash dump (see `crash_dump`) and exits with `EXIT_HUNG`. The
watchdog cannot detect that its process is suspended or that the GIL is never released. In these
cases, other processes detect that this process sends no messages.
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
"""Exit code of a process that its watchdog has ended."""

HANG_FACTOR = 5.0
"""Time limit of a step, as a multiple of the longest recent step."""

WRITE_SECONDS = 5.0  # time limit for the crash dump, because the file system may hang too
NOTIFY_SECONDS = 1.0  # time for `notify` to take effect before the exit
_NUM_CHECKS = 10  # number of checks within the shortest time limit


class ProgressTimer:
    """Timer of an activity that must make progress repeatedly, such as the engine's steps.

    The thread of the activity updates the timer, and the watchdog's thread reads it.

    Args:
        name: name of the activity, for messages.
        floor: minimum of the time limit, in seconds.
    """

    def __init__(self, name: str, floor: float) -> None:
        self.name = name
        self._floor = floor
        self._predicted = 0.0
        self._since: float | None = None  # start time; None: the timer is stopped

    def begin(self) -> None:
        """Start the timer if it is not running."""
        if self._since is None:
            self._since = time.monotonic()

    def progressed(self, predicted: float = 0.0) -> None:
        """Restart the timer; the next progress is expected in about `predicted` seconds."""
        self._predicted = predicted
        self._since = time.monotonic()

    def idle(self) -> None:
        """Stop the timer, because no progress is due."""
        self._since = None

    @property
    def bound(self) -> float:
        """Time limit, in seconds."""
        return max(self._floor, HANG_FACTOR * self._predicted)

    def extend(self, seconds: float) -> None:
        """Extend the time limit by `seconds` in which the whole process was suspended."""
        if self._since is not None:
            self._since += seconds

    def waited(self, now: float) -> float:
        """Return the number of seconds that the timer has run; 0 if it is stopped."""
        since = self._since
        return 0.0 if since is None else now - since


def _no_state() -> Mapping[str, Any]:
    return {}


class Watchdog:
    """A thread that checks timers from `start` until `stop`.

    Args:
        name: name of the process, for log and crash dump.
        seconds: minimum of every timer's time limit.
        folder: folder of the crash dumps; None: `crash_dump.default_folder`.
        notify: called in the watchdog's thread before the exit, with the reason in one line.
        end: ends the process; called with the exit code.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        folder: Path | None = None,
        notify: Callable[[str], object] = log.critical,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.state_source: Callable[[], Mapping[str, Any]] = _no_state  # returns the state to dump
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
        """Add and return a timer for the activity `name`."""
        pulse = ProgressTimer(name, self._seconds)
        self._timers.append(pulse)
        return pulse

    def start(self) -> None:
        """Start the checks. Call this on the event loop, which gets a timer too."""
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

    # ------------------------------------------------------------ the watchdog's thread

    def _watch(self) -> None:
        pause = self._seconds / _NUM_CHECKS
        looked = time.monotonic()
        while not self._stopping.wait(pause):
            now = time.monotonic()
            slept, looked = now - looked - pause, now
            if slept > pause:  # the whole process was stopped, or got no CPU time
                for pulse in self._timers:
                    pulse.extend(slept)
            late = [pulse for pulse in self._timers if pulse.waited(now) > pulse.bound]
            if late:
                self._report_and_exit(late[0], now)
                return

    def _report_and_exit(self, late: ProgressTimer, now: float) -> None:
        why = f"{late.name} made no progress for {late.waited(now):.1f} s"
        bundle = self._write(why, late)
        where = "no crash dump could be written" if bundle is None else f"crash dump: {bundle}"
        reason = f"process hung: {why} ({where})"
        log.critical("%s: %s", self._name, reason)
        self._notify(reason)
        self._stopping.wait(NOTIFY_SECONDS)
        self._exit(EXIT_HUNG)

    def _write(self, why: str, late: ProgressTimer) -> Path | None:
        """Write the crash dump; return its folder, or None if writing fails or takes too long."""
        written: list[Path] = []

        def write() -> None:
            facts = {"why": why, "bound_seconds": late.bound, "pulses": self._facts()}
            try:
                written.append(write_crash_dump(self._folder, self._name, facts, self.state_source))
            except OSError as error:
                log.error("cannot write a crash dump: %s", error)

        thread = threading.Thread(target=write, name="bundle", daemon=True)
        thread.start()
        thread.join(WRITE_SECONDS)
        return written[0] if written else None

    def _facts(self) -> dict[str, float]:
        now = time.monotonic()
        return {pulse.name: round(pulse.waited(now), 3) for pulse in self._timers}
