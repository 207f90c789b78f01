"""The limits of a helper process, which the kernel enforces."""

import ctypes
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
MAX_OPEN_FILES = 64


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def limit_process(memory_bytes: int) -> None:
    """Limit this process: no children, no core dumps, few open files, limited allocations.

    Args:
        memory_bytes: address space that the process may allocate from now on (Linux).
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # because core dumps contain prompts
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    pages = Path("/proc/self/statm")
    if pages.exists():
        used = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))


@contextmanager
def limited_time(cpu_seconds: float, wall_seconds: float) -> Iterator[None]:
    """End this process if the body of the `with` statement exceeds one of two time limits.

    The process is killed by SIGPROF for too much CPU time, and by SIGALRM for too much wall time.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
