"""Divides the cores of a machine among its CPU workers, before each step.

A worker that computes alone uses all cores. If several workers compute, each gets its share. Every
worker marks itself from its first step until it is idle. The marks are locks on bytes of one file
per user and machine, so the kernel removes the mark of a worker that has died. The results of a
step do not depend on its number of threads beyond rounding; a deterministic worker marks itself but
keeps its number of threads.
"""

import fcntl
import logging
import os
import platform
import stat
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

_STRIDE = 1 << 12
"""Number of bytes of the file per process id; larger than the number of cores of any machine."""

_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


def threads_of_step(own: int, limit: int, others: Iterable[int]) -> int:
    """Return the number of threads for the next step of a worker.

    Args:
        own: the worker's share of the cores.
        limit: number of threads if no other worker computes.
        others: shares of the other workers that compute now.

    Returns:
        A number from `own` to `limit`. If the shares of all computing workers add up to at most
        `limit`, their numbers of threads also add up to at most `limit`.
    """
    busy = sum(others)
    return max(own, limit * own // (own + busy)) if busy else max(own, limit)


class CoreMarks:
    """The marks of this user's computing workers on this machine: a locked byte range per worker.

    The length of a range is the worker's share, in cores. Only one instance per process may be
    open, because closing any descriptor of a file removes all locks of the process on this file.

    Attributes:
        machine: name of the machine and of the file; equal for all workers that use this file.

    Raises:
        OSError: the file cannot be opened, or belongs to another user.
    """

    def __init__(self, path: Path) -> None:
        self._file = _open_shared(path)
        found = os.fstat(self._file)
        self.machine = f"{platform.node()}-{found.st_dev}-{found.st_ino}"
        self._start = os.getpid() * _STRIDE

    def mark(self, num_cores: int) -> None:
        """Mark this process as computing with `num_cores` cores. Raises OSError."""
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, num_cores, self._start)

    def clear(self) -> None:
        """Remove the mark of this process."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, _STRIDE, self._start)

    def others(self) -> list[int]:
        """Return the shares of the other processes that are marked."""
        found: list[int] = []
        ranges = [(0, 0)]  # (start, length) to search; length 0 means up to the end
        while ranges:
            start, size = ranges.pop()
            query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, size, 0)
            kind, _, first, length, _ = struct.unpack(
                _FLOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, query)
            )
            # F_GETLK returns only one lock of the range, so search on both sides of this lock too
            if kind != fcntl.F_UNLCK:
                found.append(length)
                if first > start:
                    ranges.append((start, first - start))
                end = first + length
                if not size or end < start + size:
                    ranges.append((end, size and start + size - end))
        return found

    def close(self) -> None:
        """Remove the mark and close the file."""
        os.close(self._file)


def _open_shared(path: Path) -> int:
    """Open the file of marks, with a lock that keeps `remove_unused_marks` from removing it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        file = os.open(path, flags, 0o600)
        try:
            found = os.fstat(file)
            if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
                raise PermissionError(
                    f"{path} is not a regular file, or belongs to another user: remove it"
                )
            fcntl.flock(file, fcntl.LOCK_SH)
            # try again if the file was removed after it was opened
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), found):
                    return file
        except OSError:
            os.close(file)
            raise
        os.close(file)


def remove_unused_marks(path: Path) -> None:
    """Remove the file of marks unless a process has it open."""
    with suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(file)


class CoreSharing:
    """Sets the number of threads of each step of one worker.

    Args:
        own: the worker's share of the cores.
        limit: number of threads of a step if no other worker computes.
        marks: the marks of all workers.
        set_threads: sets the number of threads of the calling thread's parallel loops.
    """

    def __init__(
        self, own: int, limit: int, marks: CoreMarks, set_threads: Callable[[int], None]
    ) -> None:
        self._own = own
        self._limit = limit
        self._marks = marks
        self._set_threads = set_threads
        self._threads = 0  # number of threads of the last step
        self._is_marked = False
        self._has_failed = False  # whether marks could not be written or read

    @property
    def machine(self) -> str:
        """Name of the machine, equal for its workers; empty if the number of threads is fixed."""
        return self._marks.machine if self._limit > self._own else ""

    def begin_step(self) -> None:
        """Mark this worker as computing and choose the threads of its next step.

        Call this on the thread that computes the step.
        """
        threads = threads_of_step(self._own, self._limit, self._others())
        if threads != self._threads:
            self._set_threads(threads)
            self._threads = threads

    def _others(self) -> list[int]:
        """Mark this worker as computing, and return the shares of the others that compute."""
        try:
            if not self._is_marked:
                # Mark first, then read: if two workers start at the same time, at least one sees
                # the other.
                self._marks.mark(self._own)
                self._is_marked = True
            return self._marks.others()
        except OSError as error:
            # For example, a process of another container has the same process id and uses the file
            # too. Assume that the other cores are busy.
            if not self._has_failed:
                log.warning("this worker does not use the cores of idle workers: %s", error)
            self._has_failed = True
            return [self._limit]

    def idle(self) -> None:
        """Leave the cores to other workers until the next step."""
        if self._is_marked:
            self._marks.clear()
            self._is_marked = False


def marks_path() -> Path:
    """Return the path of the file of marks of this user."""
    return Path(tempfile.gettempdir()) / f"penstock-cores-{os.geteuid()}"


def open_core_sharing(
    own: int, limit: int, set_threads: Callable[[int], None]
) -> CoreSharing | None:
    """Return the core sharing of this process; None if it is not possible on this machine.

    Args:
        own: share of the cores.
        limit: number of threads of a step if no other worker computes; reduced to the number of
            usable cores if larger.
        set_threads: sets the number of threads of the calling thread's parallel loops.
    """
    if sys.platform != "linux":  # other systems lay out `struct flock` differently
        return None
    limit = min(limit, len(os.sched_getaffinity(0)))
    try:
        return CoreSharing(own, limit, CoreMarks(marks_path()), set_threads)
    except OSError as error:
        log.warning("this worker does not share cores with other workers: %s", error)
        return None
