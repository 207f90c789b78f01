"""Tracks and kills all descendants of this process."""

import ctypes
import os
import sys
import time
from collections.abc import Collection
from contextlib import suppress

import psutil

_SET_CHILD_SUBREAPER = 36  # value of PR_SET_CHILD_SUBREAPER for prctl(2)


class DescendantTracker:
    """Tracks the descendants of this process that were started after the tracker was created.

    On Linux, this process is a child subreaper until `kill` returns. The kernel then makes this
    process the parent of its orphaned descendants, so that the tracker finds all descendants.
    Call `reap_orphans` regularly. Otherwise, orphans that have ended remain as zombies.
    """

    def __init__(self) -> None:
        self._preexisting = {child.pid for child in _descendants()}
        self._seen: dict[int, psutil.Process] = {}
        _adopt_orphans(True)

    def alive(self) -> list[psutil.Process]:
        """Return the tracked descendants that are alive."""
        for child in _descendants():
            if child.pid not in self._preexisting:
                self._seen[child.pid] = child
        return [each for each in self._seen.values() if is_alive(each)]

    def reap_orphans(self, started: Collection[int] = ()) -> None:
        """Reap the adopted orphans that have ended.

        Children that this process has started are not reaped, because other code waits for their
        exit codes. They belong to the session of this process, while an adopted orphan usually
        belongs to the session that one of its ancestors has created.

        Args:
            started: PIDs of the children that this process has started in sessions of their own.
        """
        if sys.platform != "linux" or not _has_ended_child():
            return
        session = os.getsid(0)
        for child in psutil.Process().children():
            if child.pid in started or child.pid in self._preexisting:
                continue
            with suppress(psutil.Error, OSError):
                if child.status() == psutil.STATUS_ZOMBIE and os.getsid(child.pid) != session:
                    os.waitpid(child.pid, os.WNOHANG)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for the tracked descendants to exit."""
        deadline = time.monotonic() + seconds
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def kill(self, seconds: float) -> None:
        """Kill the tracked descendants, and then stop adopting orphans.

        The method returns after at most about `seconds`, even if a descendant is still alive.
        """
        deadline = time.monotonic() + seconds
        while (processes := self.alive()) and time.monotonic() < deadline:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.02)
        _adopt_orphans(False)


def is_alive(process: psutil.Process) -> bool:
    """Return whether any thread of the process has not ended yet.

    A killed process becomes a zombie when its main thread ends. Its sockets stay open until its
    other threads have ended too. A zombie with other threads therefore counts as alive.
    """
    with suppress(psutil.NoSuchProcess):
        if not process.is_running():
            return False
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    return False


def _has_ended_child() -> bool:
    """Return whether a child has ended but has not been reaped. Does not read all of /proc."""
    with suppress(ChildProcessError):  # this process has no children
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_ALL, 0, flags) is not None
    return False


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _adopt_orphans(wanted: bool) -> None:
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
