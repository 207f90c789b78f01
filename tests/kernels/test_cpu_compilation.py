"""Groups of loops: each is compiled by one process, whoever ends in between."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from penstock.kernels import cpu_compilation
from penstock.kernels.cpu_common.cpu_features import has_avx512
from penstock.kernels.cpu_common.numba_runtime import Entry, entry, has_numba, load_entries
from penstock.kernels.cpu_compilation import CpuKernelLoader, KernelGroup, required_groups

pytestmark = pytest.mark.skipif(not has_numba(), reason="numba is not installed")


class Disk:
    """What is compiled, as two processes see it. Threads play the processes: flock tells open
    files apart, not processes."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str]] = []  # by whom, what
        self.loaded: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def group(
        self, who: str, name: str, begun: threading.Event, go_on: threading.Event
    ) -> KernelGroup:
        """One that, when it is compiled, says that it has begun and waits."""

        def load() -> None:
            with self._lock:
                is_new = name not in [what for _, what in self.compiled]
                (self.compiled if is_new else self.loaded).append((who, name))
            if is_new:
                begun.set()
                assert go_on.wait(60)

        return KernelGroup(name, load)


def test_two_share_the_work_and_each_has_all(tmp_path: Path) -> None:
    disk = Disk()
    begun = {who: threading.Event() for who in "ab"}
    go_on = threading.Event()
    loaders = []
    for who in "ab":
        groups = [disk.group(who, name, begun[who], go_on) for name in ("one", "two")]
        loaders.append(CpuKernelLoader(groups, folder=tmp_path))
        assert begun[who].wait(60)  # for `b`: while `a` compiles
    go_on.set()
    for loader in loaders:
        loader.join()
    assert disk.compiled == [("a", "one"), ("b", "two")]
    assert sorted(disk.loaded) == [("a", "two"), ("b", "one")]


def test_importing_the_program_compiles_nothing(tmp_path: Path) -> None:
    """Whoever compiles it must not compile the loops of single operations as well, which another
    process may be compiling."""
    if not has_avx512():
        pytest.skip("no AVX-512: there are no programs")
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


def test_entries_are_compiled_when_they_are_loaded_or_called(monkeypatch: Any) -> None:
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
    """Stands for a compiled function."""

    made: ClassVar[list[str]] = []

    def __init__(self, signature: str, function: object) -> None:
        self.made.append(signature)

    def __call__(self, *arguments: object) -> None:
        pass


def test_a_holder_that_is_killed_holds_up_nobody(tmp_path: Path) -> None:
    program = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "one.lock")]
    told, loaded = threading.Event(), threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        loader = CpuKernelLoader([KernelGroup("one", loaded.set)], told.set, tmp_path)
        assert told.wait(60)
        assert not loaded.is_set()
        os.kill(holder.pid, signal.SIGKILL)
    loader.join()
    assert loaded.is_set()


def test_a_holder_that_stands_still_is_waited_for_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_compilation, "MAX_LOCK_SECONDS", 0.1)
    with cpu_compilation._lock(tmp_path, "one", 0.0) as is_held:
        assert is_held
        loaded = threading.Event()
        CpuKernelLoader([KernelGroup("one", loaded.set)], folder=tmp_path).join()
        assert loaded.is_set()


def test_without_locks_everybody_loads(tmp_path: Path) -> None:
    loaded = threading.Event()
    CpuKernelLoader([KernelGroup("one", loaded.set)], folder=tmp_path / "missing").join()
    assert loaded.is_set()


def test_what_goes_wrong_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("disk full")

    loader = CpuKernelLoader([KernelGroup("one", fail)], folder=tmp_path)
    with pytest.raises(OSError, match="disk full"):
        loader.join()


def test_a_worker_asks_for_what_it_computes_with() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert required_groups(gpu, torch.bfloat16, torch.bfloat16, False, True) == []
    wide = required_groups(cpu, torch.float32, torch.float32, False, True)
    names = [each.name for each in wide]
    assert {"attention-wide", "rotary-wide", "noise", "norms"} < set(names)
    narrow = required_groups(cpu, torch.float32, torch.bfloat16, True, False)
    assert "attention-narrow" in [each.name for each in narrow]
    assert not any(each.name.startswith("program") for each in narrow)
