"""Processes by name, so that one that answers nobody can be ended all the same."""

import os
from contextlib import suppress
from dataclasses import dataclass

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_SAME_SECONDS = 2.0  # clocks are set; a number is not given anew within so short a time


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of one of Ray's nodes; its number may be given anew, the moment of birth is not."""

    node: str
    pid: int
    create_time: float  # seconds since 1970


def own_id() -> ProcessId:
    """This process's; in one that Ray hosts."""
    node = ray.get_runtime_context().get_node_id()
    return ProcessId(node, os.getpid(), psutil.Process().create_time())


def kill(process: ProcessId) -> None:
    """Kill it, wherever it is; does not wait. Ray's own kill is a request to the process."""
    if process.node == ray.get_runtime_context().get_node_id():
        kill_local(process.pid, process.create_time)
        return
    there = NodeAffinitySchedulingStrategy(process.node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(kill_local)
    task.remote(process.pid, process.create_time)


def kill_local(pid: int, create_time: float) -> bool:
    """Kill a process of this machine; False if it is there no more."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if abs(process.create_time() - create_time) < _SAME_SECONDS:
            process.kill()
            return True
    return False
