"""Every process that this one has started, and what those have started in turn."""

import ctypes
import os
import sys
import time
from contextlib import suppress

import psutil

_SET_CHILD_SUBREAPER = 36  # prctl(2)


class DescendantTracker:
    """All descendants of this process but those that it has when this is made.

    From then until `kill` returns the kernel makes this process the parent of every descendant that
    loses its own (Linux), so that none gets out of sight.
    """

    def __init__(self) -> None:
        self._preexisting = {child.pid for child in _descendants()}
        self._seen: dict[int, psutil.Process] = {}
        _adopt_orphans(True)

    def alive(self) -> list[psutil.Process]:
        """Those that live now."""
        for child in _descendants():
            if child.pid not in self._preexisting:
                self._seen[child.pid] = child
        return [each for each in self._seen.values() if is_alive(each)]

    def wait(self, seconds: float) -> None:
        """Give them so long to end by themselves."""
        deadline = time.monotonic() + seconds
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def kill(self, seconds: float) -> None:
        """End them, and what they still start meanwhile; the kernel is given so long for it."""
        deadline = time.monotonic() + seconds
        while (processes := self.alive()) and time.monotonic() < deadline:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.02)
        _adopt_orphans(False)


def is_alive(process: psutil.Process) -> bool:
    """Return True until the process and all its threads have ended; zombies have.

    A killed process is a zombie as soon as its main thread has ended. Its sockets stay open until
    the last of its other threads has.
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
