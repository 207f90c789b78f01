"""Drains the routers and workers on a node before Kubernetes removes the node.

Pods run `python -m penstock.cluster.kubernetes.node_drain SECONDS` as their preStop hook. The
command writes a file into a folder that the node's routers and workers watch. It then waits until
all of them have drained.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from penstock.cluster.processes.start_time import start_time

# Environment variable with the folder that routers and workers watch. If it is not set, they cannot
# be drained together with their node.
FOLDER_VARIABLE = "PENSTOCK_LEAVE_FOLDER"
DRAIN_FILE = "leave"
PROCESS_SUFFIX = ".hosted"
POLL_SECONDS = 0.25


async def drain_on_request(drain: Callable[[float], Awaitable[None]]) -> None:
    """Wait until `drain_node` is called on this node, and then drain this process.

    Return immediately if the environment variable `PENSTOCK_LEAVE_FOLDER` is not set.

    Args:
        drain: drains this process; its argument is the time limit in seconds.
    """
    if FOLDER_VARIABLE not in os.environ:
        return
    folder = Path(os.environ[FOLDER_VARIABLE])
    mark = folder / _mark_name(os.getpid())
    mark.touch()
    try:
        while (seconds := _requested_seconds(folder)) is None:
            await asyncio.sleep(POLL_SECONDS)
        await drain(seconds)
    finally:
        mark.unlink(missing_ok=True)


def drain_node(folder: Path, seconds: float) -> bool:
    """Drain all processes that watch `folder`. Return False if this takes longer than `seconds`."""
    drain_file = folder / DRAIN_FILE
    drain_file.write_text(str(seconds), encoding="utf-8")
    deadline = time.monotonic() + seconds
    try:
        while _undrained_pids(folder):
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(POLL_SECONDS, seconds))
        return True
    finally:
        # Remove the file, so that processes that start here later do not drain.
        drain_file.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if a process did not drain in time, and 0 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.cluster.kubernetes.node_drain", description=__doc__
    )
    parser.add_argument("seconds", type=float, help="time limit of the drain, in seconds")
    given = parser.parse_args(arguments)
    if FOLDER_VARIABLE not in os.environ:
        parser.error(
            f"{FOLDER_VARIABLE} is not set: set it to the folder that routers and workers watch"
        )
    return 0 if drain_node(Path(os.environ[FOLDER_VARIABLE]), given.seconds) else 1


def _requested_seconds(folder: Path) -> float | None:
    with suppress(OSError, ValueError):  # the file may be missing or incomplete
        return float((folder / DRAIN_FILE).read_text(encoding="utf-8"))
    return None


def _undrained_pids(folder: Path) -> list[int]:
    """Return the PIDs of the live processes that watch `folder` and have not drained.

    After a restart of the container, `folder` still contains the marks of killed processes, and
    other processes may have their PIDs.
    """
    pids = []
    for mark in folder.glob(f"*{PROCESS_SUFFIX}"):
        pid = int(mark.name.partition("-")[0])
        with suppress(psutil.NoSuchProcess):
            if mark.name == _mark_name(pid):
                pids.append(pid)
    return pids


def _mark_name(pid: int) -> str:
    """Return the name of the file that shows that a process watches the folder."""
    return f"{pid}-{start_time(pid)}{PROCESS_SUFFIX}"


if __name__ == "__main__":
    sys.exit(main())
