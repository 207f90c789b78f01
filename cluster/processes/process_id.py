"""Identifies processes on any node of the cluster, so that hung processes can be killed."""

import os
from contextlib import suppress
from dataclasses import dataclass

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.cluster.processes.start_time import start_time

# Allowed difference of start times. On systems other than Linux, they change if the clock is
# changed. A PID is not reused within this time.
_SAME_SECONDS = 2.0


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
