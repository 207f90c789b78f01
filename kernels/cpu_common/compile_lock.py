"""File locks for compiling: of the processes of a machine, one compiles, and the others wait."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_LOCK_SECONDS = 180.0
"""Maximum wait for one lock. The wait is limited, because the process that holds the lock may be
suspended; after the wait, this process compiles the code itself."""

LOCK_POLL_SECONDS = 0.05

MAX_LOAD_SECONDS = 0.5
"""A process that holds a lock for longer than MAX_LOAD_SECONDS is compiling. To load compiled code
from disk takes less time."""


@contextmanager
def compile_lock(
    folder: Path,
    name: str,
    seconds: float = MAX_LOCK_SECONDS,
    notify: Callable[[], None] = lambda: None,
) -> Iterator[bool]:
    """Hold a lock within this context; yield False if it was not acquired in time.

    The operating system releases the lock (flock) when its process ends. On a file system without
    locks, every process gets True. Several processes may then compile the same code, which is
    slower, but correct.

    Args:
        folder: folder of the lock files. Processes that share a disk cache must use the same one.
        name: name of the code to compile.
        seconds: maximum wait; with 0, only one attempt is made.
        notify: called once when another process has held the lock for MAX_LOAD_SECONDS.
    """
    try:
        number = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        yield _acquire(number, seconds, notify)
    finally:
        os.close(number)


def _acquire(number: int, seconds: float, notify: Callable[[], None]) -> bool:
    began, notified = time.monotonic(), False
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - began
            if waited >= seconds:
                return False
            if waited >= MAX_LOAD_SECONDS and not notified:
                notify()
                notified = True
            time.sleep(LOCK_POLL_SECONDS)
        except OSError:
            return True
        else:
            return True
