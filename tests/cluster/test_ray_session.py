"""Start of a local Ray: waits for a slow raylet, and every failure is an error of one line."""

from dataclasses import dataclass, field

import psutil
import pytest

from penstock.cluster import ray_session
from penstock.cluster.ray_session import RayFailed, RaySession


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
    name: str, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(1000)
    monkeypatch.setattr(ray_session, "_get_node", registry.get_node)
    children.names.remove(name)
    with pytest.raises(OSError, match=f"{name} ended"):
        RaySession(None)._wait_for_node("gcs", "n1")
    assert registry.calls == 1


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
