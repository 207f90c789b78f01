"""Identifies processes on any node of the cluster, so that hung processes can be killed."""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

# Allowed difference of start times. On systems other than Linux, they change if the clock is
# changed. A PID is not reused within this time.
_SAME_SECONDS = 2.0
# Index of the field `starttime` in /proc/PID/stat, counted from the first field after the name.
_START_TIME_FIELD = 19


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identifies a process on a Ray node.

    If two processes have had the same PID, they differ in their start time.
    """

    node: str  # the node id that Ray assigns
    pid: int
    start_time: float  # see `start_time`; comparable only on the same node


def own_id() -> ProcessId:
    """Return the id of this process, which must be connected to Ray."""
    node = ray.get_runtime_context().get_node_id()
    return ProcessId(node, os.getpid(), start_time(os.getpid()))


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


def kill(process: ProcessId) -> None:
    """Send SIGKILL to a process on any node, without waiting for its end.

    `ray.kill` is not enough, because it only sends a message that a hung process does not read.
    """
    if process.node == ray.get_runtime_context().get_node_id():
        kill_local(process.pid, process.start_time)
        return
    there = NodeAffinitySchedulingStrategy(process.node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(kill_local)
    task.remote(process.pid, process.start_time)


def kill_local(pid: int, started: float) -> bool:
    """Kill a process on this machine. Return False if the process no longer exists.

    Args:
        pid: the PID of the process.
        started: the `start_time` of the process. Another process with this PID is not killed.
    """
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if abs(start_time(pid) - started) < _SAME_SECONDS:
            process.kill()
            return True
    return False
