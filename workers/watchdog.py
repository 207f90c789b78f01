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

from penstock.workers.bundle import write_bundle

log = logging.getLogger(__name__)

EXIT_HUNG = 86
"""The exit code of a process that its watchdog has ended."""

PATIENCE = 5.0
"""A step may take so many times what the longest of late took."""

SECONDS_TO_WRITE = 5.0  # the bundle: its folder may hang too
SECONDS_TO_TELL = 1.0
_LOOKS = 10  # in the shortest bound


class Pulse:
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

    def moved(self, predicted: float = 0.0) -> None:
        """What was due has come, and the next of it is due; it takes about so many seconds."""
        self._predicted = predicted
        self._since = time.monotonic()

    def rest(self) -> None:
        """Nothing is due."""
        self._since = None

    @property
    def bound(self) -> float:
        """Seconds."""
        return max(self._floor, PATIENCE * self._predicted)

    def forgive(self, seconds: float) -> None:
        """It could not go on for so long, as nothing here could."""
        if self._since is not None:
            self._since += seconds

    def waited(self, now: float) -> float:
        """Seconds since something was due; 0 if nothing is."""
        since = self._since
        return 0.0 if since is None else now - since


def _nothing() -> Mapping[str, Any]:
    return {}


class Watchdog:
    """Watches from `start` until `stop`.

    Args:
        name: of whom it watches, for the bundle.
        seconds: that anything may take.
        folder: of the bundles; None: one of its own in the folder for temporary files.
        tell: told why, in one line, just before the end; called in the watchdog's thread.
        end: ends the process; given the exit code.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        folder: Path | None = None,
        tell: Callable[[str], object] = log.critical,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.about: Callable[[], Mapping[str, Any]] = _nothing  # for the bundle: who works on what
        self._name = name
        self._seconds = seconds
        self._folder = folder
        self._tell = tell
        self._end = end
        self._pulses: list[Pulse] = []
        self._beating: asyncio.Task[None] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def pulse(self, name: str) -> Pulse:
        """A new one, for who does that."""
        pulse = Pulse(name, self._seconds)
        self._pulses.append(pulse)
        return pulse

    def start(self) -> None:
        """From now on; on the event loop, which it watches too."""
        self._beating = asyncio.create_task(self._beat(self.pulse("the event loop")))
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._beating is not None:
            self._beating.cancel()

    async def _beat(self, pulse: Pulse) -> None:
        while True:
            pulse.moved()
            await asyncio.sleep(self._seconds / _LOOKS)

    # ------------------------------------------------------------ its own thread

    def _watch(self) -> None:
        pause = self._seconds / _LOOKS
        looked = time.monotonic()
        while not self._stopping.wait(pause):
            now = time.monotonic()
            slept, looked = now - looked - pause, now
            if slept > pause:  # the process was stopped, or has no share of the machine
                for pulse in self._pulses:
                    pulse.forgive(slept)
            late = [pulse for pulse in self._pulses if pulse.waited(now) > pulse.bound]
            if late:
                self._finish(late[0], now)
                return

    def _finish(self, late: Pulse, now: float) -> None:
        why = f"{late.name} has not moved for {late.waited(now):.1f} s"
        bundle = self._write(why, late)
        where = "no bundle could be written" if bundle is None else f"see {bundle}"
        reason = f"it hung: {why} ({where})"
        log.critical("%s: %s", self._name, reason)
        self._tell(reason)
        self._stopping.wait(SECONDS_TO_TELL)
        self._end(EXIT_HUNG)

    def _write(self, why: str, late: Pulse) -> Path | None:
        """The bundle, unless its folder takes too long or refuses."""
        written: list[Path] = []

        def write() -> None:
            facts = {"why": why, "bound_seconds": late.bound, "pulses": self._facts()}
            try:
                written.append(write_bundle(self._folder, self._name, facts, self.about))
            except OSError as error:
                log.error("no bundle: %s", error)

        thread = threading.Thread(target=write, name="bundle", daemon=True)
        thread.start()
        thread.join(SECONDS_TO_WRITE)
        return written[0] if written else None

    def _facts(self) -> dict[str, float]:
        now = time.monotonic()
        return {pulse.name: round(pulse.waited(now), 3) for pulse in self._pulses}
