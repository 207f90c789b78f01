"""A machine that is about to be taken away lets the router or worker that runs on it drain first.

A file in a folder of that machine is the message: `python -m penstock.cluster.kubernetes.node_drain
SECONDS` (the preStop hook of a Kubernetes pod) writes it and waits until every process hosted there
has drained.
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

FOLDER_VARIABLE = "PENSTOCK_LEAVE_FOLDER"  # unset: nothing on this machine is ever asked to leave
DRAIN_FILE = "leave"
PROCESS_SUFFIX = ".hosted"
POLL_SECONDS = 0.25


async def drain_on_request(drain: Callable[[float], Awaitable[None]]) -> None:
    """Waits until this machine is asked to leave, then drains, and ends.

    `drain` is given the seconds that there are.
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
    """Ask all that is hosted here to drain, and wait; whether all had ended in `seconds`."""
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
        drain_file.unlink(missing_ok=True)  # what is started here again must not leave at once


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where something had not ended in time."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.cluster.kubernetes.node_drain", description=__doc__
    )
    parser.add_argument("seconds", type=float, help="that what runs here is given to end")
    given = parser.parse_args(arguments)
    if FOLDER_VARIABLE not in os.environ:
        parser.error(f"{FOLDER_VARIABLE} is not set: nobody here would hear it")
    return 0 if drain_node(Path(os.environ[FOLDER_VARIABLE]), given.seconds) else 1


def _requested_seconds(folder: Path) -> float | None:
    with suppress(OSError, ValueError):  # not there, or being written just now
        return float((folder / DRAIN_FILE).read_text(encoding="utf-8"))
    return None


def _undrained_pids(folder: Path) -> list[int]:
    """Processes that have not drained yet; one that was killed left its mark behind."""
    pids = [
        int(mark.name.removesuffix(PROCESS_SUFFIX)) for mark in folder.glob(f"*{PROCESS_SUFFIX}")
    ]
    return [pid for pid in pids if psutil.pid_exists(pid)]


if __name__ == "__main__":
    sys.exit(main())
