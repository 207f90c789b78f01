"""Whether a worker on this machine has computed something lately: what a readiness probe asks.

A worker keeps a file in the folder of `leave`, as old as its last token. The probe of a Kubernetes
pod, `python -m penstock.cluster.kubernetes.readiness_probe SECONDS`, exits with 0 where there is a
younger one.
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
    """Keeps the file until it is cancelled; `silence` are the seconds since the last token."""
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
    """Why none is ready, `now` in seconds since 1970; empty where one is."""
    ages = [
        age for mark in folder.glob(f"*{READINESS_SUFFIX}") if (age := _age(mark, now)) is not None
    ]
    if not ages:
        return "no worker serves here"
    if min(ages) <= seconds:
        return ""
    return f"the worker here has computed nothing for {min(ages):.0f} s, a canary neither"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where none is ready."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.cluster.kubernetes.readiness_probe", description=__doc__
    )
    parser.add_argument("seconds", type=float, help="that the last token may be old")
    given = parser.parse_args(arguments)
    if FOLDER_VARIABLE not in os.environ:
        parser.error(f"{FOLDER_VARIABLE} is not set: no worker here could tell")
    reason = not_ready_reason(Path(os.environ[FOLDER_VARIABLE]), given.seconds, time.time())
    if reason:
        print(reason, file=sys.stderr)
    return 1 if reason else 0


def _age(mark: Path, now: float) -> float | None:
    """Of a living worker's last token; None: it is dead, and only its file is left."""
    if psutil.pid_exists(int(mark.name.removesuffix(READINESS_SUFFIX))):
        with suppress(FileNotFoundError):
            return now - mark.stat().st_mtime
    return None


if __name__ == "__main__":
    sys.exit(main())
