"""Runs sections, each in its own process with a time limit, so that failures are isolated."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LAST_WORDS = 2000  # characters of the process output that a failure report contains


@dataclass(frozen=True, slots=True)
class Section:
    """A module that runs in its own process and writes its results to the file of `--json`.

    The section fails if its exit code is not 0, if it takes longer than `seconds`, or if its
    results contain `failures`.
    """

    name: str
    module: str
    seconds: float
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a section. A failed section may have figures, too."""

    name: str
    seconds: float
    failures: list[str]  # reasons of the failure; empty if the section passed
    figures: dict[str, Any]

    @property
    def passed(self) -> bool:
        return not self.failures


def run_section(section: Section, seconds_left: float) -> Outcome:
    """Run a section; stop it after `section.seconds` or `seconds_left`, whichever is less."""
    began, limit = time.monotonic(), min(section.seconds, seconds_left)
    if limit <= 0:
        return Outcome(section.name, 0.0, ["not started: no time left"], {})
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        path, words = Path(folder) / "figures.json", Path(folder) / "words"
        command = [sys.executable, "-m", section.module, "--json", str(path), *section.arguments]
        with words.open("w+b") as output:
            reason = _wait(command, section.environment, output.fileno(), limit)
            last = _last_words(words) if reason else ""
        figures = read_figures(path)
    failures = [f"{reason}; end of its output:\n{last}"] if reason else []
    failures += figures.get("failures", [])
    if not figures and not failures:
        failures = ["it wrote no results"]
    return Outcome(section.name, time.monotonic() - began, failures, figures)


def _wait(command: Sequence[str], environment: Mapping[str, str], words: int, limit: float) -> str:
    """Run a process. Return "" if it succeeded, otherwise the reason of the failure.

    Afterwards, its whole process group is killed, so that no process stays on the device.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=words,
        stderr=words,
        text=True,
        start_new_session=True,
    )
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"stopped after its time limit of {limit:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"exited with code {code}" if code else ""


def _last_words(path: Path) -> str:
    return path.read_text(errors="replace")[-_LAST_WORDS:].strip()


def read_figures(path: Path) -> dict[str, Any]:
    """Return the results in a file, or {} if the file is missing or invalid."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Write results atomically.

    After a crash, the file still has the previous results.
    """
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(figures))
    temporary.replace(path)
