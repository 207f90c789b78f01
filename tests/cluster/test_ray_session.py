"""Start of a local Ray: waits for a slow raylet, and every failure is an error of one line."""

import ctypes
import re
import signal
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray

from penstock.cluster import ray_session
from penstock.cluster.ray_session import ProcessEnded, RayFailed, RaySession


@dataclass
class Process:
    title: str

    def name(self) -> str:
        if self.title == "ended":
            raise psutil.NoSuchProcess(1)
        return self.title


@dataclass
class Children:
    """A fake tracker of the child processes of a Ray session."""

    names: list[str] = field(default_factory=lambda: ["ended", "gcs_server", "raylet"])

    def alive(self) -> list[Process]:
        return [Process(name) for name in self.names]

    def wait(self, seconds: float) -> None:
        pass

    def kill(self, seconds: float) -> None:
        pass


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    children = Children()
    monkeypatch.setattr(ray_session, "DescendantTracker", lambda: children)
    monkeypatch.setattr(ray_session, "SECONDS_BETWEEN_CALLS", 0.0)
    return children


class Registry:
    """A fake GCS server. Call number `first_success` finds the node; earlier calls fail."""

    def __init__(self, first_success: int) -> None:
        self.first_success = first_success
        self.calls = 0

    def get_node(self, address: str, node: str) -> dict[str, str]:
        self.calls += 1
        if self.calls < self.first_success:
            raise RuntimeError(f"{address} does not know {node}")
        return {"node": node}


def test_slow_raylet_is_awaited(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(1000)
    monkeypatch.setattr(ray_session, "_get_node", registry.get_node)
    assert RaySession(None)._wait_for_node("gcs", "n1") == {"node": "n1"}
    assert registry.calls == 1000


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_node_is_not_awaited_after_a_process_has_ended(
    name: str, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(1000)
    monkeypatch.setattr(ray_session, "_get_node", registry.get_node)
    children.names.remove(name)
    session = RaySession(None)
    session._folder = tmp_path
    with pytest.raises(OSError, match=f"{name} ended during its start$"):
        session._wait_for_node("gcs", "n1")
    assert registry.calls == 1
    logs = tmp_path / "ray" / "session_2026-11-30" / "logs"
    logs.mkdir(parents=True)
    (logs / f"{name}.out").write_text("[10:00 I] started\n[10:01 C] port conflict\n    @ main()\n")
    with pytest.raises(
        OSError, match=rf"{name} ended during its start: \[10:01 C\] port conflict$"
    ):
        session._wait_for_node("gcs", "n1")


def test_wait_for_a_raylet_is_bounded(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "_get_node", Registry(1000).get_node)
    monkeypatch.setattr(ray_session, "SECONDS_TO_START", 0.0)
    with pytest.raises(RuntimeError, match="gcs does not know n1"):
        RaySession(None)._wait_for_node("gcs", "n1")


@pytest.mark.parametrize("kind", [Exception, OSError, RuntimeError, AssertionError])
def test_any_failure_of_ray_is_an_error_of_one_line(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(session: RaySession) -> None:
        raise kind("The current node timed out.\nMore lines.")

    monkeypatch.setattr(RaySession, "_start", fail)
    monkeypatch.setattr(RaySession, "stop", lambda session: None)
    with pytest.raises(RayFailed) as failure, RaySession(None):
        pass
    assert str(failure.value) == "Ray did not start: The current node timed out."


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("step", ["alive", "shutdown", "wait", "kill"])
@pytest.mark.parametrize("has_started", [False, True])
def test_signal_during_the_cleanup_does_not_skip_the_rest_of_it(
    step: str,
    kind: type[BaseException],
    has_started: bool,
    children: Children,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def call(name: str, *_: object) -> list[Process]:
        calls.append(name)
        if name == step and calls.count(name) == 1:
            raise kind
        return []

    def start(session: RaySession, folder: Path) -> None:
        (folder / "ray").mkdir()
        for name in ("alive", "wait", "kill"):
            monkeypatch.setattr(children, name, partial(call, name))
        if not has_started:
            raise RuntimeError("The current node timed out.")

    monkeypatch.setattr(RaySession, "_init_local", start)
    monkeypatch.setattr(RaySession, "_start", RaySession._start_repeatedly)
    monkeypatch.setattr(ray, "shutdown", partial(call, "shutdown"))
    session = RaySession(None)
    with pytest.raises(kind), session:
        assert has_started
    assert calls[-5:] == ["alive", "shutdown", "wait", "kill", "kill"], (
        "all steps, without a signal"
    )
    assert session._folder is not None
    assert not session._folder.exists()


def test_cleanup_of_a_failed_start_does_not_use_the_signal_handler_of_ray(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    handlers: list[object] = []

    def start(session: RaySession) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        raise RuntimeError("The current node timed out.")

    monkeypatch.setattr(RaySession, "_start", start)
    monkeypatch.setattr(ray, "shutdown", lambda: handlers.append(signal.getsignal(signal.SIGTERM)))
    try:
        with pytest.raises(RayFailed), RaySession(None):
            pass
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handlers == [before]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sigterm_is_handled_after_ray_has_reset_its_action(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_handled() -> bool:
        (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path("/proc/self/status").read_text())
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    def reset() -> None:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(signal.SIGTERM, None)  # SIG_DFL; unlike `signal.signal`, Python does not see it

    monkeypatch.setattr(ray, "shutdown", reset)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert is_handled()
        reset()
        assert not is_handled()
        RaySession(None).stop()
        assert is_handled()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_processes_of_ray_keep_their_exit_codes_when_orphans_are_reaped() -> None:
    session = RaySession(None)
    with session._start_process(["false"], env={}) as process:
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            pass
        session.reap_orphans()
        assert process.wait() == 1
    session.abandon()


@pytest.mark.parametrize("failures", [0, 2, 3])
@pytest.mark.usefixtures("children")
def test_ray_is_started_again_if_one_of_its_processes_ends(
    failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    folders: list[Path] = []

    def start(session: RaySession, folder: Path) -> None:
        assert folder.is_dir()
        folders.append(folder)
        if len(folders) <= failures:
            raise ProcessEnded("raylet ended during its start")

    monkeypatch.setattr(RaySession, "_init_local", start)
    session = RaySession(None)
    try:
        if failures < ray_session.MAX_STARTS:
            session._start_repeatedly()
        else:
            with pytest.raises(ProcessEnded):
                session._start_repeatedly()
        again = [each.getMessage() for each in caplog.records if "again" in each.getMessage()]
        assert len(again) == len(folders) - 1 == min(failures, ray_session.MAX_STARTS - 1)
        assert [each.is_dir() for each in folders] == [False] * len(again) + [True]
    finally:
        session.abandon()
    assert not folders[-1].exists()
