"""Writes crash dumps of a hung process: the stacks of its threads and the scheduler's state.

Each dump is a folder; only the newest dumps are kept. Dumps contain no tokens and no request text.
"""

import faulthandler
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MAX_DUMPS = 16
"""Number of dumps to keep; older ones are removed when a new one is written."""

PREFIX = "hung-"
STACKS, STATE = "stacks.txt", "state.json"


def default_folder() -> Path:
    """Return the default folder of crash dumps; it is kept when the cluster's files are removed."""
    return Path(tempfile.gettempdir()) / f"penstock-crash-dumps-{os.getuid()}"


def write_crash_dump(
    folder: Path | None,
    name: str,
    facts: Mapping[str, Any],
    state_source: Callable[[], Mapping[str, Any]],
) -> Path:
    """Write a crash dump and return its folder. Raises OSError if writing fails.

    `state_source` may raise an exception, because a thread may hang in the middle of a change of
    the state. The dump then contains the exception instead of the state.
    """
    folder = default_folder() if folder is None else folder
    _open_folder(folder)
    plain = re.sub(r"[^\w.-]+", "-", name)
    path = (
        folder / f"{PREFIX}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{plain}-{os.getpid()}"
    )
    path.mkdir(mode=0o700)
    with (path / STACKS).open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    state = {
        "name": name,
        "pid": os.getpid(),
        "at": time.time(),
        **facts,
        **_state_or_error(state_source),
    }
    (path / STATE).write_text(json.dumps(state, indent=1, default=str) + "\n", encoding="utf-8")
    for old in sorted(folder.glob(f"{PREFIX}*"))[:-MAX_DUMPS]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def _open_folder(folder: Path) -> None:
    """Create the folder for this user only. Raises PermissionError if another user owns it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(
            f"the crash dump folder {folder} is a link or a file, or belongs to another user: "
            "expected a folder of this user; set crash_dump_dir to another folder"
        )


def _state_or_error(state_source: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return state_source()
    except Exception as error:
        return {"unknown": f"{type(error).__name__}: {error}"}
