"""Compilation of CPU kernels: each group is compiled once, even if a process is killed."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from penstock.kernels import cpu_compilation
from penstock.kernels.cpu_common.compile_lock import compile_lock
from penstock.kernels.cpu_common.cpu_features import has_avx2
from penstock.kernels.cpu_common.numba_runtime import Entry, entry, has_numba, load_entries
from penstock.kernels.cpu_compilation import (
    CpuKernelLoader,
    CpuKernelNeeds,
    KernelGroup,
    deferrable_groups,
    required_groups,
)
from penstock.kernels.linear import cpu_packed_f32

pytestmark = pytest.mark.skipif(not has_numba(), reason="numba is not installed")


class SharedCache:
    """A disk cache shared by two simulated processes.

    Threads stand in for processes, because an flock belongs to an open file, not to a process.
    """

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str]] = []  # (process, group) of each compilation
        self.loaded: list[tuple[str, str]] = []  # (process, group) of each load
        self._lock = threading.Lock()

    def group(
        self, process: str, name: str, started: threading.Event, resume: threading.Event
    ) -> KernelGroup:
        """Return a group whose compilation sets `started`, then waits for `resume`."""

        def load() -> None:
            with self._lock:
                is_first = name not in [group for _, group in self.compiled]
                (self.compiled if is_first else self.loaded).append((process, name))
            if is_first:
                started.set()
                assert resume.wait(60)

        return KernelGroup(name, load)


def test_two_processes_divide_the_compilation_and_both_load_all_groups(tmp_path: Path) -> None:
    cache = SharedCache()
    started = {process: threading.Event() for process in "ab"}
    resume = threading.Event()
    loaders = []
    for process in "ab":
        groups = [cache.group(process, name, started[process], resume) for name in ("one", "two")]
        loaders.append(CpuKernelLoader(groups, folder=tmp_path))
        assert started[process].wait(60)  # `b` starts while `a` is still compiling
    resume.set()
    for loader in loaders:
        loader.join()
    assert cache.compiled == [("a", "one"), ("b", "two")]
    assert sorted(cache.loaded) == [("a", "two"), ("b", "one")]


def test_importing_the_step_graph_interpreter_compiles_nothing(tmp_path: Path) -> None:
    """The import must not compile loops that another process may be compiling."""
    if not has_avx2():
        pytest.skip("step graphs need AVX2")
    code = (
        "from numba.core import event\n"
        "from penstock.kernels.cpu_common.numba_runtime import configure_numba\n"
        "configure_numba()\n"
        "with event.install_recorder('numba:compile') as recorder:\n"
        "    from penstock.kernels.step_graph import interpreter\n"
        "print([each.data['dispatcher'].__name__ for _, each in recorder.buffer])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout == "[]\n"


def test_entries_are_compiled_once_when_first_loaded_or_called(monkeypatch: Any) -> None:
    import numba

    monkeypatch.setattr(numba, "njit", lambda signature, **options: partial(Compiled, signature))
    made = Compiled.made
    made.clear()

    @entry("void(int64)", parallel=True)
    def function(number: int) -> None:
        raise AssertionError("the compiled form is called")

    other = Entry(print, "void(float32)")
    assert made == []
    load_entries(function)
    load_entries(function)
    assert made == ["void(int64)"]
    other(1.0)
    other(2.0)
    assert made == ["void(int64)", "void(float32)"]


class Compiled:
    """A fake compiled function that records its signature."""

    made: ClassVar[list[str]] = []

    def __init__(self, signature: str, function: object) -> None:
        self.made.append(signature)

    def __call__(self, *arguments: object) -> None:
        pass


def test_a_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    program = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "one.lock")]
    notified, loaded = threading.Event(), threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        loader = CpuKernelLoader([KernelGroup("one", loaded.set)], notified.set, tmp_path)
        assert notified.wait(60)
        assert not loaded.is_set()
        os.kill(holder.pid, signal.SIGKILL)
    loader.join()
    assert loaded.is_set()


def test_waiting_for_a_suspended_process_ends_after_max_lock_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_compilation, "MAX_LOCK_SECONDS", 0.1)
    with compile_lock(tmp_path, "one", 0.0) as is_held:
        assert is_held
        loaded = threading.Event()
        CpuKernelLoader([KernelGroup("one", loaded.set)], folder=tmp_path).join()
        assert loaded.is_set()


def test_groups_load_without_a_folder_for_locks(tmp_path: Path) -> None:
    loaded = threading.Event()
    CpuKernelLoader([KernelGroup("one", loaded.set)], folder=tmp_path / "missing").join()
    assert loaded.is_set()


def test_join_raises_the_error_of_the_loader_thread(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("disk full")

    loader = CpuKernelLoader([KernelGroup("one", fail)], folder=tmp_path)
    with pytest.raises(OSError, match="disk full"):
        loader.join()


def test_required_groups_depend_on_the_needs() -> None:
    wide = required_groups(CpuKernelNeeds("float32", "float32"))
    names = [each.name for each in wide]
    assert {"attention-float32", "rotary-float32", "noise", "norms", "gates"} < set(names)
    narrow = required_groups(CpuKernelNeeds("float32", "bfloat16", ("int8",), single_rank=False))
    assert "attention-bfloat16" in [each.name for each in narrow]
    assert not any(each.name.startswith("program") for each in narrow)


def deferred(needs: CpuKernelNeeds) -> set[str]:
    """Return the names of the groups that can be deferred, without their dtypes."""
    return {each.name.split("-")[0] for each in deferrable_groups(required_groups(needs), needs)}


def test_only_a_worker_whose_rounding_may_change_defers_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_packed_f32, "has_avx2", lambda: True)
    monkeypatch.setattr(cpu_compilation, "lock_folder", lambda: tmp_path)
    monkeypatch.setattr(cpu_compilation, "has_persistent_cache", lambda: True)
    needs = CpuKernelNeeds("float32", "float32")
    assert deferred(needs) == {
        *("program", "panels", "attention", "scans", "rotary", "norms", "gates")
    }
    assert deferred(replace(needs, deterministic=True)) == set()
    # The ranks of a worker would round differently.
    assert deferred(replace(needs, single_rank=False)) == set()
    monkeypatch.setattr(cpu_compilation, "has_persistent_cache", lambda: False)
    assert deferred(needs) == set()


def test_loaded_groups_are_not_deferred_by_later_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_compilation, "lock_folder", lambda: tmp_path)
    monkeypatch.setattr(cpu_compilation, "has_persistent_cache", lambda: True)
    needs, names = CpuKernelNeeds("float32", "float32"), ("one", "two")
    one, two = (KernelGroup(name, lambda: None, is_deferrable=True) for name in names)
    assert deferrable_groups([one, two], needs) == (two, one)  # the quickest group comes first
    CpuKernelLoader([one], folder=tmp_path).join()
    assert deferrable_groups([one, two], needs) == (two,)
    # An installation in another folder, or another CPU, has another cache.
    monkeypatch.setattr(cpu_compilation, "_installation", lambda: "other")
    assert deferrable_groups([one, two], needs) == (two, one)
