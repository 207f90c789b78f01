"""The section "tests of kernels" of `make gpu`: a line per test, stopped runs, failures."""

import json
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.loadtests.gpu import kernel_tests
from penstock.loadtests.gpu.kernel_tests import (
    FOLDERS,
    LONGEST,
    MAX_FAILURES,
    ROOT,
    SEPARATE_FILES,
    Results,
    files_of_tests,
    run_pytest,
)
from penstock.loadtests.gpu.options import Options
from tests.support.only_kernels import only_kernels

ENDS = 200.0  # time limit in seconds, long enough for any run of pytest here


def results_of(folder: Path, *lines: dict[str, Any], end: str = "") -> Results:
    path = folder / "lines"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    results = Results()
    results.read(path)
    return results


def line(test: str, outcome: str = "passed", why: str = "") -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "seconds": 1.0, "why": why}


def test_lines_are_summed_by_file(tmp_path: Path) -> None:
    results = results_of(
        tmp_path,
        *(line(name, "started") for name in ("b.py::x", "a.py::y", "a.py::z", "a.py::w")),
        line("b.py::x"),
        line("a.py::y", "failed", "\n".join(map(str, range(99)))),
        line("a.py::y"),  # pytest also reports the teardown, which passes
        line("a.py::z", "skipped"),
        end='{"test": "a.py::w", "outc',
    )
    assert results.running == ["a.py::w"]
    figures = results.figures()
    assert list(figures["files"]) == ["a.py", "b.py"]
    assert figures["files"]["a.py"] == {"seconds": 2.0, "said": "1 failed, 1 skipped"}
    (failure,) = figures["failures"]
    assert failure.startswith("a.py::y: 84\n")  # a failure keeps only the end of its traceback
    assert failure.endswith("\n98")


def test_failures_are_bounded(tmp_path: Path) -> None:
    many = [line(f"a.py::{number}", "failed", "why") for number in range(MAX_FAILURES + 5)]
    failures = results_of(tmp_path, line("a.py::fine"), *many).figures()["failures"]
    assert len(failures) == MAX_FAILURES + 1
    assert failures[-1].startswith("5 more failed tests")


def test_no_passed_test_is_a_failure(tmp_path: Path) -> None:
    for lines in ([], [line("a.py::x", "skipped")]):
        assert results_of(tmp_path, *lines).figures()["failures"] == ["no kernel test passed"]


def test_there_are_files_to_run() -> None:
    names = [path.name for path in files_of_tests(ROOT, FOLDERS)]
    assert {"test_fallback.py", "test_device_runner.py", *LONGEST, *SEPARATE_FILES} <= {*names}
    assert {*names[: len(LONGEST)]} <= {*LONGEST}


@pytest.mark.process
def test_kernel_test_fails_on_fallback_to_torch(tmp_path: Path) -> None:
    """On the "meta" device, every launcher falls back to torch, so every test must fail."""
    path, lines = ROOT / "tests/kernels/interpreted/test_activation.py", tmp_path / "lines"
    assert {*run_pytest([path], "meta", lines, time.monotonic() + ENDS, 1)} <= {""}
    results = Results()
    results.read(lines)
    failures = results.figures()["failures"]
    expected = "KernelFallbackError: a tensor is on meta, so no GPU kernel would compute it"
    assert sum(expected in failure for failure in failures) > 5
    assert results.running == []
    assert failures[-1] == "no kernel test passed"


@pytest.fixture
def own_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let `run_pytest` run only the file at the returned path, which the test writes."""
    monkeypatch.setattr(kernel_tests, "ROOT", tmp_path)
    monkeypatch.setattr(kernel_tests, "MARKS", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path / "test_own.py"


@pytest.mark.process
def test_a_process_with_a_cuda_error_is_replaced(own_tests: Path, tmp_path: Path) -> None:
    own_tests.write_text(
        "import os, pytest\n"
        "seen = []\n"
        "@pytest.mark.parametrize('number', range(6))\n"
        "def test(number):\n"
        "    seen.append(number)\n"
        "    assert 0 not in seen, 'CUDA error: an illegal memory access was encountered'\n"
    )
    lines = tmp_path / "lines"
    assert {*run_pytest([own_tests], "cpu", lines, time.monotonic() + ENDS, 2)} <= {""}
    results = Results()
    results.read(lines)
    # The test after the CUDA error is reported as crashed; a new process runs the others.
    outcomes = [each["outcome"] for each in results.lines.values()]
    assert len(outcomes) == 6
    assert 1 <= outcomes.count("failed") <= 2
    assert any("illegal memory access" in each.get("why", "") for each in results.lines.values())


@pytest.mark.process
def test_results_before_the_time_limit_are_kept(own_tests: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    own_tests.write_text("import time\ndef test_ends(): pass\ndef test_hangs(): time.sleep(100)\n")
    results = Results()
    # Stop the run once the second test runs. The duration of the first test does not matter.
    run = run_pytest([own_tests], "cpu", lines, time.monotonic() + ENDS, 1)
    for _ in run:
        results.read(lines)
        if results.running and results.lines:
            run.close()
    assert results.running == ["test_own.py::test_hangs"]
    assert [each["outcome"] for each in results.lines.values()] == ["passed"]
    (stopped,) = run_pytest([own_tests], "cpu", lines, time.monotonic() - 1, 1)
    assert stopped == "stopped: no time left"


@pytest.mark.process
def test_a_run_of_pytest_that_cannot_start_says_why(own_tests: Path, tmp_path: Path) -> None:
    own_tests.write_text("import nothing_of_this_name\n")
    *_, problem = run_pytest([own_tests], "cpu", tmp_path / "x", time.monotonic() + ENDS, 1)
    assert problem.startswith("pytest exited with code 2:")
    assert "nothing_of_this_name" in problem


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_of_kernel_tests_forbids_fallback(folder: str) -> None:
    conftest = import_module(f"{folder.replace('/', '.')}.conftest")
    assert conftest.only_kernels is only_kernels


def test_file_that_needs_all_memory_runs_after_all_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    groups: list[tuple[list[str], int]] = []

    def stub(files: list[Path], device: str, lines: Path, ends: float, num_processes: int) -> Any:
        groups.append(([path.name for path in files], num_processes))
        with lines.open("a") as file:
            file.writelines(json.dumps(line(str(path))) + "\n" for path in files[:2])
            file.write(json.dumps(line("hangs", "started")) + "\n")
        yield ""
        yield "stopped: no time left"

    monkeypatch.setattr(kernel_tests, "run_pytest", stub)
    options = Options(torch.device("cpu"), Path("unused"), None, "", small=False, folder=tmp_path)
    results = list(kernel_tests.measure(options, ends=0.0))
    (together, many), (separate, one) = groups
    assert separate == ["test_on_gpu.py"]
    assert one == 1 < many
    assert len(together) == len(files_of_tests(ROOT, FOLDERS)) - 1
    assert results[-1]["failures"] == ["stopped: no time left; running: hangs"] * 2
    assert len(results[-1]["files"]) == 3
    assert (tmp_path / kernel_tests.LINES).exists()
