"""Grows a process's table of file descriptors before the process has clients."""

import fcntl
import os
import resource
from contextlib import suppress

NUM_DESCRIPTORS = 4096


def reserve_descriptors(count: int = NUM_DESCRIPTORS) -> None:
    """Grow the file descriptor table of this process to `count` entries, if its limit allows.

    Linux doubles the table when a new descriptor does not fit. In a process with several threads,
    the kernel then waits for an RCU grace period (`expand_fdtable` in `fs/file.c`). This wait takes
    tens of seconds if all cores are busy.

    If the thread that opened the file holds the GIL, the wait also stops the event loop. The
    process then looks dead to its peers. Routers and workers therefore grow their tables at the
    start, before they have clients. A table of 4,096 entries takes 32 KiB.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    last = (count if limit == resource.RLIM_INFINITY else min(count, limit)) - 1
    with suppress(OSError), open(os.devnull, "rb") as file:
        os.close(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, last))
