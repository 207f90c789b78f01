"""Tests of kernels on the device: a process a file, several at once, since compiling is long."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.loadtests.gpu.options import Options, read_options
from penstock.loadtests.gpu.sections import write_figures

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("tests/kernels", "tests/workers/device")
MARKS = "interpreted or gpu"
NUM_PROCESSES = 6
FILE_SECONDS = 150
_NOTHING_CHOSEN = 5  # pytest's exit code
_LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class FileRun:
    name: str
    code: int
    seconds: float
    words: str

    @property
    def chosen(self) -> bool:
        return self.code != _NOTHING_CHOSEN

    @property
    def summary(self) -> str:
        """pytest's last line."""
        return self.words.strip().splitlines()[-1] if self.words.strip() else "it said nothing"


def files_of_tests(root: Path, folders: Sequence[str]) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("test_*.py"))


def run_file(path: Path, device: str) -> FileRun:
    environment = {**os.environ, "PENSTOCK_TEST_DEVICE": device}
    # A kernel is compiled or interpreted for good when its module is imported.
    environment.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    name, began = str(path.relative_to(ROOT)), time.monotonic()
    command = (sys.executable, "-m", "pytest", name, "-q", "-m", MARKS, "-p", "no:cacheprovider")
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=FILE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return FileRun(name, -1, FILE_SECONDS, f"stopped after {FILE_SECONDS} s")
    return FileRun(name, done.returncode, time.monotonic() - began, done.stdout + done.stderr)


def figures_of(runs: Sequence[FileRun]) -> dict[str, Any]:
    """Files of which no test is for a device do not count; without any other it is a failure."""
    chosen = [run for run in runs if run.chosen]
    failures = [
        f"{run.name}: " + "\n".join(run.words.strip().splitlines()[-_LAST_LINES:])
        for run in chosen
        if run.code
    ]
    if not any(" passed" in run.summary for run in chosen):
        failures.append("no test of a kernel has passed")
    return {
        "files": {run.name: {"seconds": run.seconds, "said": run.summary} for run in chosen},
        "failures": failures,
    }


def measure(options: Options) -> dict[str, Any]:
    if find_spec("pytest") is None:
        return {"failures": ["pytest is not installed here: see docs/gpu.md, how to carry it"]}
    folders = FOLDERS[1:] if options.small else FOLDERS
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        files = files_of_tests(ROOT, folders)
        runs = pool.map(lambda path: run_file(path, options.device.type), files)
        return figures_of(list(runs))


def main() -> int:
    options = read_options("kernel_tests")
    write_figures(options.json, measure(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
