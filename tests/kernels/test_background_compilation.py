"""Child processes compile deferred groups of loops, while the worker already serves."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.kernels import background_compilation
from penstock.kernels.background_compilation import BackgroundLoader
from penstock.kernels.cpu_common.deferred_loops import finish, is_deferred
from penstock.kernels.cpu_common.numba_runtime import has_numba
from penstock.kernels.cpu_compilation import CpuKernelNeeds, KernelGroup

pytestmark = pytest.mark.skipif(not has_numba(), reason="numba is not installed")

NEEDS = CpuKernelNeeds("float32", "float32")
NAMES = ("first", "second")


class Groups:
    """Groups that record what is loaded, and whether they were deferred at that time."""

    def __init__(self) -> None:
        self.loaded = list[str]()

    def make(self) -> list[KernelGroup]:
        return [KernelGroup(name, lambda name=name: self._load(name)) for name in NAMES]  # type: ignore[misc]

    def _load(self, name: str) -> None:
        assert is_deferred(name)
        self.loaded.append(name)


@pytest.fixture
def groups() -> Iterator[Groups]:
    yield Groups()
    for name in NAMES:
        finish(name)


def run(groups: Groups, code: str) -> None:
    """Run a loader whose child process executes `code`, until the child has ended."""
    loader = BackgroundLoader(NEEDS, groups.make(), [sys.executable, "-c", code])
    assert all(is_deferred(name) for name in NAMES)
    loader.start()
    loader.join()


def test_each_group_is_loaded_when_the_child_has_compiled_it(
    groups: Groups, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run(groups, "print('second\\na warning\\nfirst')")
    assert groups.loaded == ["second", "first"]
    assert not any(is_deferred(name) for name in NAMES)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]


def test_group_is_used_while_the_child_still_compiles_others(
    groups: Groups, tmp_path: Path
) -> None:
    resume = tmp_path / "resume"
    os.mkfifo(resume)
    code = f"print('first', flush=True)\nopen({str(resume)!r}).read()\nprint('second')"
    loader = BackgroundLoader(NEEDS, groups.make(), [sys.executable, "-c", code])
    loader.start()
    with resume.open("w"):  # waits until the child has printed the first name and reads
        while is_deferred("first"):
            time.sleep(0.01)
        assert is_deferred("second")
    loader.join()
    assert groups.loaded == ["first", "second"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; print('first'); sys.exit('disk is full')", "disk is full (exit status 1)"),
        ("import os; os.kill(os.getpid(), 9)", " (exit status -9)"),
        ("print('first')", "first (exit status 0)"),
    ],
    ids=["error", "killed", "incomplete"],
)
def test_groups_that_a_child_did_not_compile_stay_deferred(
    groups: Groups, code: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run(groups, code)
    assert [name for name in NAMES if not is_deferred(name)] == groups.loaded
    assert is_deferred("second")
    (record,) = caplog.records
    assert f"could not be compiled: {reason}." in record.getMessage()


def test_command_that_cannot_be_started_is_logged(
    groups: Groups, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        loader = BackgroundLoader(NEEDS, groups.make(), [str(tmp_path / "missing")])
        loader.start()
        loader.join()
    assert groups.loaded == []
    assert "No such file" in caplog.text


def test_loader_without_groups_starts_no_child(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("not needed"))
    loader = BackgroundLoader(NEEDS, (), [str(tmp_path / "missing")])
    loader.start()
    loader.join()


def private_cache(folder: Path) -> dict[str, str]:
    return {**os.environ, "NUMBA_CACHE_DIR": str(folder)}


def test_child_ends_when_its_worker_has_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-m", background_compilation.__name__, "{}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=private_cache(tmp_path)
    ) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait() == 1
    assert not list(tmp_path.rglob("*.compiled"))


@pytest.mark.slow
def test_worker_loads_what_a_real_child_has_compiled(tmp_path: Path) -> None:
    """The worker compiles nothing itself, and a later worker defers nothing."""
    code = (
        "from numba.core import event\n"
        "from penstock.kernels import background_compilation as b, cpu_compilation as c\n"
        "needs = c.CpuKernelNeeds('float32', 'float32')\n"
        "groups = c.required_groups(needs)\n"
        "deferred = [g for g in c.deferrable_groups(groups, needs) if g.name == 'norms']\n"
        "with event.install_recorder('numba:compile') as recorder:\n"
        "    loader = b.BackgroundLoader(needs, deferred)\n"
        "    loader.start()\n"
        "    loader.join()\n"
        "left = [g.name for g in c.deferrable_groups(groups, needs)]\n"
        "print(len(deferred), len(recorder.buffer), 'norms' in left, 'rotary-float32' in left)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=private_cache(tmp_path),
    )
    assert done.stdout == "1 0 False True\n"
