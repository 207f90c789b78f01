"""Child processes compile deferred groups of loops, while the workers already serve."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from penstock.kernels import background_compilation, compile_groups, cpu_compilation
from penstock.kernels.background_compilation import MAX_FAILURES, BackgroundLoader
from penstock.kernels.cpu_common.compile_lock import compile_lock
from penstock.kernels.cpu_common.deferred_loops import finish, is_deferred
from penstock.kernels.cpu_common.numba_runtime import has_numba
from penstock.kernels.cpu_compilation import CpuKernelNeeds, KernelGroup

pytestmark = pytest.mark.skipif(not has_numba(), reason="numba is not installed")

NEEDS = CpuKernelNeeds("float32", "float32")
NAMES = ("first", "second")


class Machine:
    """A folder for marks and locks, and groups that record the order in which they are loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded = list[str]()

    def load(self, name: str) -> None:
        assert is_deferred(name)
        self.loaded.append(name)

    def child(self, *actions: str) -> list[str]:
        """Return the command of a child; the action "first" marks the group "first" as compiled."""
        marks = {name: f"open({str(self.mark(name))!r}, 'w')" for name in NAMES}
        lines = [marks.get(each, each) for each in actions]
        log = f"open({str(self.folder / 'children')!r}, 'a').write('x')"
        return [sys.executable, "-c", "\n".join(["import os, sys", log, *lines])]

    def mark(self, name: str) -> Path:
        return cpu_compilation._mark(self.folder, name)

    def num_children(self) -> int:
        path = self.folder / "children"
        return len(path.read_text()) if path.exists() else 0

    def loader(self, *actions: str) -> BackgroundLoader:
        groups = [KernelGroup(name, partial(self.load, name)) for name in NAMES]
        return BackgroundLoader(NEEDS, groups, self.child(*actions))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(background_compilation, "lock_folder", lambda: tmp_path)
    yield Machine(tmp_path)
    for name in NAMES:
        finish(name)


def messages(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if (each.levelname, each.name) == (level, background_compilation.__name__)
    ]


def test_groups_are_deferred_until_a_child_has_compiled_them(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    loader = machine.loader("second", "first")
    assert all(is_deferred(name) for name in NAMES)
    with caplog.at_level(logging.INFO):
        loader.start()
        loader.join()
    assert sorted(machine.loaded) == ["first", "second"]
    assert not any(is_deferred(name) for name in NAMES)
    assert machine.num_children() == 1
    assert len(messages(caplog, "INFO")) == 2
    assert messages(caplog, "WARNING") == []


def test_group_is_used_while_the_child_still_compiles_others(machine: Machine) -> None:
    resume = machine.folder / "resume"
    os.mkfifo(resume)
    loader = machine.loader("first", f"open({str(resume)!r}).read()", "second")
    loader.start()
    with resume.open("w"):  # blocks until the child reads, after the first group
        deadline = time.monotonic() + 60
        while is_deferred("first") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (is_deferred("first"), is_deferred("second")) == (False, True)
    loader.join()
    assert machine.loaded == ["first", "second"]


def test_worker_waits_for_groups_that_another_process_compiles(machine: Machine) -> None:
    loader = machine.loader("sys.exit('not needed')")
    with (
        compile_lock(machine.folder, "first", 0.0),
        compile_lock(machine.folder, "second", 0.0),
    ):
        loader.start()
        for name in ("second", "first"):
            machine.mark(name).touch()
            deadline = time.monotonic() + 60
            while is_deferred(name) and time.monotonic() < deadline:
                time.sleep(0.01)
        loader.join()
    assert machine.loaded == ["second", "first"]
    assert machine.num_children() == 0


def test_second_child_compiles_what_the_first_one_did_not(machine: Machine) -> None:
    second = f"open({str(machine.mark('second'))!r}, 'w')"
    loader = machine.loader(f"if os.path.exists({str(machine.mark('first'))!r}): {second}", "first")
    loader.start()
    loader.join()
    assert machine.loaded == ["first", "second"]
    assert machine.num_children() == 2


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        (("first", "print('a line')", "sys.exit('disk is full')"), "disk is full"),
        (("first", "sys.stdout.flush()", "os.kill(os.getpid(), 9)"), "exit status -9"),
        (("first",), "exit status 0"),
    ],
    ids=["error", "killed", "incomplete"],
)
def test_worker_gives_up_groups_that_children_do_not_compile(
    machine: Machine,
    actions: tuple[str, ...],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        loader = machine.loader(*actions)
        loader.start()
        loader.join()
    assert machine.loaded == ["first"]
    assert is_deferred("second")
    assert machine.num_children() == MAX_FAILURES + 1  # the first child compiled one group
    (message,) = messages(caplog, "WARNING")
    assert f"the CPU kernels second could not be compiled: {reason}." in message


def test_command_that_cannot_be_started_is_logged(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        loader = BackgroundLoader(
            NEEDS,
            [KernelGroup("first", partial(machine.load, "first"))],
            [str(machine.folder / "no")],
        )
        loader.start()
        loader.join()
    (message,) = messages(caplog, "WARNING")
    assert "No such file" in message
    assert machine.loaded == []


def test_loader_without_groups_starts_no_child(machine: Machine) -> None:
    loader = BackgroundLoader(NEEDS, (), machine.child())
    loader.start()
    loader.join()
    assert machine.num_children() == 0


def private_cache(folder: Path) -> dict[str, str]:
    return {**os.environ, "NUMBA_CACHE_DIR": str(folder)}


def test_child_ends_when_its_worker_has_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-m", compile_groups.__name__, json.dumps(asdict(NEEDS)), "norms"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=private_cache(tmp_path)) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait() == compile_groups.PARENT_ENDED
    assert not list(tmp_path.rglob("*.compiled"))


@pytest.mark.slow
def test_worker_loads_what_a_real_child_has_compiled(tmp_path: Path) -> None:
    """The worker compiles nothing itself, and a later worker does not defer the group."""
    code = (
        "import logging\n"
        "from numba.core import event\n"
        "from penstock.kernels import background_compilation as b, cpu_compilation as c\n"
        "logging.basicConfig()\n"
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
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=private_cache(tmp_path),
    )
    assert done.stdout == "1 0 False True\n"
