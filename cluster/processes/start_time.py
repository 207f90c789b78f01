"""Start times of processes, which distinguish processes that have had the same PID."""

import os
import sys
from pathlib import Path

import psutil

# Index of the field `starttime` in /proc/PID/stat, counted from the first field after the name.
_START_TIME_FIELD = 19


def start_time(pid: int) -> float:
    """Return the time when a process on this machine started, in seconds.

    On Linux, it is the time since the boot of the machine, which does not change if the wall clock
    is changed. On other systems, it is the time since 1970.

    Raises:
        psutil.NoSuchProcess: the process does not exist.
    """
    if sys.platform != "linux":
        return psutil.Process(pid).create_time()
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    # The name of the process is in parentheses, and may itself contain parentheses and spaces.
    ticks = stat.rpartition(b")")[2].split()[_START_TIME_FIELD]
    return int(ticks) / os.sysconf("SC_CLK_TCK")
