"""Sections of a run: a process each, with its time, so that one that fails hides no other."""

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

_LAST_WORDS = 2000  # characters


@dataclass(frozen=True, slots=True)
class Section:
    """One process: a module that is given `--json FILE` and writes its figures there.

    It fails with any exit code but 0, beyond its time, and where its figures say `failures`.
    """

    name: str
    module: str
    seconds: float
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a section. Its figures are kept whether it failed or not."""

    name: str
    seconds: float
    failures: list[str]  # why it failed; none: it did not
    figures: dict[str, Any]

    @property
    def passed(self) -> bool:
        return not self.failures


def run_section(section: Section, seconds_left: float) -> Outcome:
    """Runs it, within its own time and what is left of all."""
    began, limit = time.monotonic(), min(section.seconds, seconds_left)
    if limit <= 0:
        return Outcome(section.name, 0.0, ["no time was left for it"], {})
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        path, words = Path(folder) / "figures.json", Path(folder) / "words"
        command = [sys.executable, "-m", section.module, "--json", str(path), *section.arguments]
        with words.open("w+b") as output:
            reason = _wait(command, section.environment, output.fileno(), limit)
            last = _last_words(words) if reason else ""
        figures = read_figures(path)
    failures = [f"{reason}; its last words:\n{last}"] if reason else []
    failures += figures.get("failures", [])
    if not figures and not failures:
        failures = ["it left no figures"]
    return Outcome(section.name, time.monotonic() - began, failures, figures)


def _wait(command: Sequence[str], environment: Mapping[str, str], words: int, limit: float) -> str:
    """Why the process failed; empty if it did not. Whatever it started ends with it: what is left
    on the device would be in the next section's way."""
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
        return f"stopped after its {limit:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"ended with {code}" if code else ""


def _last_words(path: Path) -> str:
    return path.read_text(errors="replace")[-_LAST_WORDS:].strip()


def read_figures(path: Path) -> dict[str, Any]:
    """What a section wrote; nothing where it wrote nothing, or not all of it."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Whole or not at all: what was measured before something failed is kept."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(figures))
    temporary.replace(path)
