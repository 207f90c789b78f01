"""The section that runs the kernel tests: it finds their files, and fails if no test passed."""

import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

from penstock.loadtests.gpu import kernel_tests
from penstock.loadtests.gpu.kernel_tests import (
    FOLDERS,
    LONGEST,
    ROOT,
    SEPARATE_FILES,
    FileRun,
    figures_of,
    files_of_tests,
)
from penstock.loadtests.gpu.options import Options
from tests.support.only_kernels import only_kernels


def test_a_file_without_a_test_for_a_device_does_not_count() -> None:
    runs = [
        FileRun("a.py", 0, 1.0, "...\n3 passed in 1s\n"),
        FileRun("b.py", 5, 1.0, "no tests ran\n"),
        FileRun("c.py", 1, 1.0, "\n".join(map(str, range(99))) + "\n1 failed in 1s\n"),
        FileRun("d.py", -1, 9.0, "stopped after 9 s"),
    ]
    figures = figures_of(runs)
    assert list(figures["files"]) == ["a.py", "c.py", "d.py"]
    assert figures["files"]["a.py"]["said"] == "3 passed in 1s"
    assert [failure.split(":")[0] for failure in figures["failures"]] == ["c.py", "d.py"]
    assert "1 failed in 1s" in figures["failures"][0]
    assert "\n0\n" not in figures["failures"][0]  # only the end of the output


def test_no_passed_test_is_a_failure() -> None:
    skipped = figures_of([FileRun("a.py", 0, 1.0, "s\n1 skipped in 1s")])
    assert skipped["failures"] == ["no kernel test passed"]
    assert figures_of([FileRun("b.py", 5, 1.0, "")])["failures"] == ["no kernel test passed"]


def test_there_are_files_to_run() -> None:
    names = {path.name for path in files_of_tests(ROOT, FOLDERS)}
    assert {"test_fallback.py", "test_device_runner.py", *LONGEST, *SEPARATE_FILES} <= names


@pytest.mark.process
def test_kernel_test_fails_on_fallback_to_torch() -> None:
    """On device "meta", every launcher uses its torch fallback."""
    path = ROOT / "tests/kernels/interpreted/test_activation.py"
    run = kernel_tests.run_file(path, "meta", time.monotonic() + 200)
    assert run.code == 1
    assert (
        "KernelFallbackError: a tensor on meta would not be computed by a kernel on meta"
        in run.words
    )
    assert " passed" not in run.summary


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_of_kernel_tests_forbids_fallback(folder: str) -> None:
    conftest = import_module(f"{folder.replace('/', '.')}.conftest")
    assert conftest.only_kernels is only_kernels


OPTIONS = Options(torch.device("cpu"), Path("unused"), None, "", small=False)


def test_file_that_needs_all_memory_runs_after_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    def run_file(path: Path, device: str, ends: float) -> FileRun:
        started.append(path.name)
        return FileRun(str(path), 0, 1.0, "1 passed in 1s")

    monkeypatch.setattr(kernel_tests, "run_file", run_file)
    results = list(kernel_tests.measure(OPTIONS, ends=0.0))
    assert started[-1] == "test_on_gpu.py"
    assert set(LONGEST) == {*started[: 2 * len(LONGEST) - 1]}  # two of the names occur twice
    assert [len(figures["files"]) for figures in results[:3]] == [1, 2, 3]
    assert len(started) == len(files_of_tests(ROOT, FOLDERS))


def test_file_is_stopped_when_the_section_runs_out_of_time() -> None:
    path = ROOT / "tests/kernels/test_fallback.py"
    late = kernel_tests.run_file(path, "cpu", time.monotonic() - 1)
    assert late.words == "not started: no time left"
    hurried = kernel_tests.run_file(path, "cpu", time.monotonic() + 0.01)
    assert hurried.words == "stopped after 0 s"
    assert figures_of([late, hurried])["failures"][:2] == [
        f"{late.name}: {late.words}",
        f"{hurried.name}: {hurried.words}",
    ]
