"""Runs the kernel tests on the device with pytest.

The tests run in parallel processes if xdist is installed. Every test appends a JSON line to a file
when it ends (`pytest_lines`), so the results of a run that is stopped are kept. Files that need all
device memory run alone, after the others.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.loadtests.gpu.options import Options, read_options
from penstock.loadtests.gpu.sections import write_figures

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("tests/kernels", "tests/workers/gpu")
MARKS = "interpreted or gpu"
SECONDS = 215.0  # time limit of the section, in seconds
INTERPRETED_SECONDS = 600.0  # time limit under Triton's interpreter, on a busy machine
MARGIN_SECONDS = 8.0  # part of SECONDS that is reserved for writing the results
SEPARATE_SECONDS = 45.0  # part of SECONDS that is reserved for SEPARATE_FILES
TEST_SECONDS = 60  # time limit of one test on a GPU, if the plugin pytest-timeout is installed
# pytest gets the files with the longest tests first.
LONGEST = ("test_deterministic.py", "test_attention.py", "test_moe.py")
SEPARATE_FILES = ("test_on_gpu.py",)  # files whose tests need all device memory
NUM_PROCESSES = max(2, min(14, (os.cpu_count() or 2) - 2))
LINES = "kernel-tests.jsonl"
MAX_FAILURES = 30  # maximum number of tracebacks in the results; the file of lines has all
# Pytest's exit codes for "no tests collected" and "tests failed".
_NOTHING_CHOSEN, _TESTS_FAILED = 5, 1
_LAST_LINES = 15


@dataclass(slots=True)
class Results:
    """Results of the tests that ended, and problems that belong to no single test."""

    # For each test, the line that reports its failure; its last line if the test did not fail.
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)  # tests that have started and not ended
    problems: list[str] = field(default_factory=list)

    def read(self, path: Path) -> None:
        """Read the lines that the tests have written so far."""
        self.lines, started = {}, dict[str, None]()
        for text in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):  # the last line of the file may be incomplete
                line = json.loads(text)
                started[line["test"]] = None
                if line["outcome"] != "started" and not self._failed(line["test"]):
                    self.lines[line["test"]] = line
        self.running = [test for test in started if test not in self.lines]

    def _failed(self, test: str) -> bool:
        return test in self.lines and self.lines[test]["outcome"] == "failed"

    def figures(self) -> dict[str, Any]:
        """Return the results as JSON values. Without a passed test, the section fails, too."""
        failed = [line for line in self.lines.values() if line["outcome"] == "failed"]
        failures = [
            f"{line['test']}: " + "\n".join(line["why"].strip().splitlines()[-_LAST_LINES:])
            for line in failed[:MAX_FAILURES]
        ]
        if len(failed) > MAX_FAILURES:
            failures.append(f"{len(failed) - MAX_FAILURES} more failed tests: see {LINES}")
        if not any(line["outcome"] == "passed" for line in self.lines.values()):
            failures.append("no kernel test passed")
        return {"files": self._files(), "failures": self.problems + failures}

    def _files(self) -> dict[str, Any]:
        files: dict[str, list[dict[str, Any]]] = {}
        for test, line in sorted(self.lines.items()):
            files.setdefault(test.partition("::")[0], []).append(line)
        return {
            name: {
                "seconds": sum(line["seconds"] for line in lines),
                "said": ", ".join(
                    f"{number} {outcome}"
                    for outcome, number in Counter(line["outcome"] for line in lines).items()
                ),
            }
            for name, lines in files.items()
        }


def seconds_on(device: str) -> float:
    """Return the time limit of the section."""
    return SECONDS if device == "cuda" else INTERPRETED_SECONDS


def files_of_tests(root: Path, folders: Sequence[str]) -> list[Path]:
    """Return the test files, those with the longest tests first."""
    files = [path for folder in folders for path in sorted((root / folder).rglob("test_*.py"))]
    return sorted(files, key=lambda path: path.name not in LONGEST)


def run_pytest(
    files: Sequence[Path], device: str, lines: Path, ends: float, num_processes: int
) -> Generator[str, None, None]:
    """Run pytest on files until time `ends` (of `time.monotonic`).

    While pytest runs, "" is yielded about once per second. If pytest did not end as expected, the
    reason is yielded last.
    """
    environment = {
        **os.environ,
        "PENSTOCK_TEST_DEVICE": device,
        "PENSTOCK_TEST_LINES": str(lines),
    }
    # Triton reads TRITON_INTERPRET when a kernel's module is imported.
    environment.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-m", MARKS, "-p", "no:cacheprovider"]
    command += ["-p", "penstock.loadtests.gpu.pytest_lines"]
    if find_spec("xdist") and num_processes > 1:
        command += ["-n", str(num_processes), "--dist", "worksteal"]
    if device == "cuda" and find_spec("pytest_timeout"):
        # The timeout method "signal" would not interrupt a wait for the GPU.
        command += ["--timeout", str(TEST_SECONDS), "--timeout-method", "thread"]
    command += [str(path.relative_to(ROOT)) for path in files]
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=words, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None and time.monotonic() < ends:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(1.0, max(0.0, ends - time.monotonic())))
                yield ""
            if process.poll() is None:
                yield "stopped: no time left"
            elif process.returncode not in (0, _TESTS_FAILED, _NOTHING_CHOSEN):
                words.seek(0)
                last = "\n".join(words.read().strip().splitlines()[-_LAST_LINES:])
                yield f"pytest exited with code {process.returncode}:\n{last}"
        finally:
            process.kill()
            process.wait()


def measure(options: Options, ends: float) -> Iterator[dict[str, Any]]:
    """Run all files until time `ends` (of `time.monotonic`) and yield the results so far."""
    if find_spec("pytest") is None:
        yield {"failures": ["pytest is not installed: see `make gpu-carry` in docs/gpu.md"]}
        return
    files = files_of_tests(ROOT, FOLDERS[1:] if options.small else FOLDERS)
    separate = [path for path in files if path.name in SEPARATE_FILES]
    together = [path for path in files if path not in separate]
    with tempfile.TemporaryDirectory() as temporary:
        lines = (options.folder or Path(temporary)) / LINES
        results = Results()
        for group, num_processes, until in (
            (together, NUM_PROCESSES, ends - SEPARATE_SECONDS),
            (separate, 1, ends),
        ):
            for problem in run_pytest(group, options.device.type, lines, until, num_processes):
                results.read(lines)
                if problem:
                    running = f"; running: {', '.join(results.running)}" if results.running else ""
                    results.problems.append(problem + running)
                yield results.figures()


def main() -> int:
    began, options = time.monotonic(), read_options("kernel_tests")
    ends = began + seconds_on(options.device.type) - MARGIN_SECONDS
    for figures in measure(options, ends):
        write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
