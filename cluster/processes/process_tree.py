"""Tracks and kills all descendants of this process."""

import ctypes
import os
import sys
import time
from contextlib import suppress

import psutil

_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


class DescendantTracker:
    """Tracks the descendants of this process, except those that existed before the tracker.

    Until `kill` returns, this process is a child subreaper (Linux): the kernel makes this process
    the parent of orphaned descendants, so that the tracker can find all descendants.
    """

    def __init__(self) -> None:
        self._preexisting = {child.pid for child in _descendants()}
        self._seen: dict[int, psutil.Process] = {}
        _adopt_orphans(True)

    def alive(self) -> list[psutil.Process]:
        """Return the descendants that are alive."""
        for child in _descendants():
            if child.pid not in self._preexisting:
                self._seen[child.pid] = child
        return [each for each in self._seen.values() if is_alive(each)]

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for the descendants to exit."""
        deadline = time.monotonic() + seconds
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def kill(self, seconds: float) -> None:
        """Kill all descendants within `seconds`, if possible; then stop adopting orphans."""
        deadline = time.monotonic() + seconds
        while (processes := self.alive()) and time.monotonic() < deadline:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.02)
        _adopt_orphans(False)


def is_alive(process: psutil.Process) -> bool:
    """Return True until the process and all its threads have ended.

    A killed process is a zombie as soon as its main thread has ended, but its sockets stay open
    until its other threads have ended too. A zombie without threads counts as ended.
    """
    with suppress(psutil.NoSuchProcess):
        if not process.is_running():
            return False
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    return False


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _adopt_orphans(wanted: bool) -> None:
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
