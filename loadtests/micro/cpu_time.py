"""CPU time of processes with a resolution of nanoseconds. (`psutil` reads ticks of 10 ms.)"""

import ctypes
import os
import time

import psutil

_libc = ctypes.CDLL(None)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of all its descendants, in seconds.

    The time of ended threads is included. The time of ended processes is not included.

    Raises OSError or psutil.NoSuchProcess if the process does not exist.
    """
    process = psutil.Process(pid)
    return sum(map(_own_seconds, (pid, *(each.pid for each in process.children(recursive=True)))))


def _own_seconds(pid: int) -> float:
    clock = ctypes.c_int()
    error = _libc.clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise OSError(error, os.strerror(error))
    return time.clock_gettime(clock.value)
