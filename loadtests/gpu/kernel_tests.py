"""Runs the kernel tests on the device, with one process per file.

Several files run in parallel, because compiling takes long. Files that need all device memory run
one at a time.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.loadtests.gpu.options import Options, read_options
from penstock.loadtests.gpu.sections import write_figures

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("tests/kernels", "tests/workers/gpu")
MARKS = "interpreted or gpu"
SECONDS = 150.0  # time limit of the section
MARGIN_SECONDS = 8.0  # part of SECONDS reserved for writing the results
LONGEST = ("test_deterministic.py", "test_attention.py", "test_moe.py")  # started first
SEPARATE_FILES = ("test_on_gpu.py",)  # files that need all device memory
NUM_PROCESSES = max(2, min(12, (os.cpu_count() or 2) - 2))
_NOTHING_CHOSEN = 5  # exit code of pytest if no test was selected
_LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class FileRun:
    """Result of running pytest on one file."""

    name: str
    code: int  # exit code; -1: not started or timed out
    seconds: float
    words: str  # output of pytest, or the reason why pytest did not finish

    @property
    def chosen(self) -> bool:
        """True if the file has tests for a device."""
        return self.code != _NOTHING_CHOSEN

    @property
    def summary(self) -> str:
        """Last line of pytest's output."""
        return self.words.strip().splitlines()[-1] if self.words.strip() else "no output"


def files_of_tests(root: Path, folders: Sequence[str]) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("test_*.py"))


def run_file(path: Path, device: str, ends: float) -> FileRun:
    """Run pytest on one file; stop pytest at time `ends` (of `time.monotonic`)."""
    environment = {**os.environ, "PENSTOCK_TEST_DEVICE": device}
    # Triton reads TRITON_INTERPRET when a kernel's module is imported.
    environment.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    name, began = str(path.relative_to(ROOT)), time.monotonic()
    if (seconds := ends - began) <= 0:
        return FileRun(name, -1, 0.0, "not started: no time left")
    command = (sys.executable, "-m", "pytest", name, "-q", "-m", MARKS, "-p", "no:cacheprovider")
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return FileRun(name, -1, seconds, f"stopped after {seconds:.0f} s")
    return FileRun(name, done.returncode, time.monotonic() - began, done.stdout + done.stderr)


def figures_of(runs: Sequence[FileRun]) -> dict[str, Any]:
    """Summarize the runs; ignore files that have no tests for a device.

    If no test passed in any file, this is a failure, too.
    """
    chosen = [run for run in runs if run.chosen]
    failures = [
        f"{run.name}: " + "\n".join(run.words.strip().splitlines()[-_LAST_LINES:])
        for run in chosen
        if run.code
    ]
    if not any(" passed" in run.summary for run in chosen):
        failures.append("no kernel test passed")
    in_order = sorted(chosen, key=lambda run: run.name)
    return {
        "files": {run.name: {"seconds": run.seconds, "said": run.summary} for run in in_order},
        "failures": failures,
    }


def measure(options: Options, ends: float) -> Iterator[dict[str, Any]]:
    """Run all files until time `ends` (of `time.monotonic`); yield results after each file."""
    if find_spec("pytest") is None:
        yield {"failures": ["pytest is not installed: see `make gpu-carry` in docs/gpu.md"]}
        return
    files = files_of_tests(ROOT, FOLDERS[1:] if options.small else FOLDERS)
    runs: list[FileRun] = []

    def run(path: Path) -> FileRun:
        return run_file(path, options.device.type, ends)

    together = [path for path in files if path.name not in SEPARATE_FILES]
    together.sort(key=lambda path: path.name not in LONGEST)
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        futures = [pool.submit(run, path) for path in together]
        for future in as_completed(futures):
            runs.append(future.result())
            yield figures_of(runs)
    for path in files:
        if path.name in SEPARATE_FILES:
            runs.append(run(path))
            yield figures_of(runs)


def main() -> int:
    ends = time.monotonic() + SECONDS - MARGIN_SECONDS
    options = read_options("kernel_tests")
    for figures in measure(options, ends):
        write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
