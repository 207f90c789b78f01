"""Readiness probe of a worker's pod: the pod is ready if a step of its worker succeeded recently.

Each worker keeps a file in the folder that `node_drain` uses. The modification time of the file is
the time of the worker's last successful step. The command `python -m
penstock.cluster.kubernetes.readiness_probe SECONDS` exits with 0 if the newest of these files is at
most SECONDS old.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from penstock.cluster.kubernetes.node_drain import FOLDER_VARIABLE

READINESS_SUFFIX = ".computed"
TOUCH_SECONDS = 1.0


async def keep_readiness_file(silence: Callable[[], float]) -> None:
    """Keep the readiness file of this process up to date until cancelled.

    Args:
        silence: returns the seconds since the worker's last successful step.
    """
    if FOLDER_VARIABLE not in os.environ:
        return
    mark = Path(os.environ[FOLDER_VARIABLE]) / f"{os.getpid()}{READINESS_SUFFIX}"
    mark.touch()
    try:
        while True:
            at = time.time() - silence()
            os.utime(mark, (at, at))
            await asyncio.sleep(TOUCH_SECONDS)
    finally:
        mark.unlink(missing_ok=True)


def not_ready_reason(folder: Path, seconds: float, now: float) -> str:
    """Return the reason why no worker on this node is ready, or "" if one is ready.

    Args:
        folder: folder with the workers' readiness files.
        seconds: largest allowed age of a worker's last successful step.
        now: present time, in seconds since 1970.
    """
    ages = [
        age for mark in folder.glob(f"*{READINESS_SUFFIX}") if (age := _age(mark, now)) is not None
    ]
    if not ages:
        return "no worker serves on this node"
    if min(ages) <= seconds:
        return ""
    return (
        f"the worker on this node has computed no token, not even a canary, for {min(ages):.0f} s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if no worker on this node is ready, and 0 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.cluster.kubernetes.readiness_probe", description=__doc__
    )
    parser.add_argument(
        "seconds",
        type=float,
        help="largest allowed age of a worker's last successful step, in seconds",
    )
    given = parser.parse_args(arguments)
    if FOLDER_VARIABLE not in os.environ:
        parser.error(
            f"{FOLDER_VARIABLE} is not set: set it to the folder where workers keep their files"
        )
    reason = not_ready_reason(Path(os.environ[FOLDER_VARIABLE]), given.seconds, time.time())
    if reason:
        print(reason, file=sys.stderr)
    return 1 if reason else 0


def _age(mark: Path, now: float) -> float | None:
    """Return the seconds since a worker's last successful step, or None if the worker is dead."""
    if psutil.pid_exists(int(mark.name.removesuffix(READINESS_SUFFIX))):
        with suppress(FileNotFoundError):
            return now - mark.stat().st_mtime
    return None


if __name__ == "__main__":
    sys.exit(main())
