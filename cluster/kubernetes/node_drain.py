"""Drains the router or worker on a node before Kubernetes removes the node.

`python -m penstock.cluster.kubernetes.node_drain SECONDS`, the preStop hook of a pod, writes a file
into a folder that the node's processes watch, and waits until all these processes have drained.
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

FOLDER_VARIABLE = "PENSTOCK_LEAVE_FOLDER"  # if this variable is unset, the node cannot be drained
DRAIN_FILE = "leave"
PROCESS_SUFFIX = ".hosted"
POLL_SECONDS = 0.25


async def drain_on_request(drain: Callable[[float], Awaitable[None]]) -> None:
    """Wait for a request to drain this node, call `drain` with the time limit [s], and return.

    Return at once if `PENSTOCK_LEAVE_FOLDER` is not set.
    """
    if FOLDER_VARIABLE not in os.environ:
        return
    folder = Path(os.environ[FOLDER_VARIABLE])
    mark = folder / f"{os.getpid()}{PROCESS_SUFFIX}"
    mark.touch()
    try:
        while (seconds := _requested_seconds(folder)) is None:
            await asyncio.sleep(POLL_SECONDS)
        await drain(seconds)
    finally:
        mark.unlink(missing_ok=True)


def drain_node(folder: Path, seconds: float) -> bool:
    """Drain all processes that watch `folder`; return False if the drain exceeds `seconds`."""
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
        drain_file.unlink(missing_ok=True)  # so that processes started here later do not drain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a process did not drain in time."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.cluster.kubernetes.node_drain", description=__doc__
    )
    parser.add_argument("seconds", type=float, help="time limit of the drain")
    given = parser.parse_args(arguments)
    if FOLDER_VARIABLE not in os.environ:
        parser.error(
            f"{FOLDER_VARIABLE} is not set: set it to the folder that routers and workers watch"
        )
    return 0 if drain_node(Path(os.environ[FOLDER_VARIABLE]), given.seconds) else 1


def _requested_seconds(folder: Path) -> float | None:
    with suppress(OSError, ValueError):  # the file is missing or is being written
        return float((folder / DRAIN_FILE).read_text(encoding="utf-8"))
    return None


def _undrained_pids(folder: Path) -> list[int]:
    """Return the PIDs of live processes that have not drained; ignore files of killed processes."""
    pids = [
        int(mark.name.removesuffix(PROCESS_SUFFIX)) for mark in folder.glob(f"*{PROCESS_SUFFIX}")
    ]
    return [pid for pid in pids if psutil.pid_exists(pid)]


if __name__ == "__main__":
    sys.exit(main())
