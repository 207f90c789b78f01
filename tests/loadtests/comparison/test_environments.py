import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtests.comparison.engines import HERE, Environment
from penstock.loadtests.comparison.environments import NotInstalled, cache_folder, python_of

PEER = Environment("peer", ("peer==1",), ("bad",), {"CMAKE_ARGS": "-DX=1"})


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """What pip would have been told, and how it was to compile; it succeeds."""
    told = []

    def run(command: list[str], **options: Any) -> Any:
        told.append((command[2:], options["env"].get("CMAKE_ARGS", "")))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(venv, "create", lambda folder, **_: folder.mkdir())
    monkeypatch.setattr(subprocess, "run", run)
    return told


def test_ours_is_the_one_that_runs(tmp_path: Path) -> None:
    assert python_of(HERE, tmp_path) == Path(sys.executable)
    assert list(tmp_path.iterdir()) == []


def test_installed_once_and_again_when_other_things_are_asked_for(
    tmp_path: Path, pip: list[tuple[list[str], str]]
) -> None:
    first = python_of(PEER, tmp_path)
    assert python_of(PEER, tmp_path) == first
    assert [command[2] for command, _ in pip] == ["install", "uninstall"]
    assert pip[0][0][-1] == "peer==1"
    assert "--no-cache-dir" in pip[0][0]
    assert pip[0][1] == "-DX=1"
    assert python_of(Environment("peer", ("peer==2",)), tmp_path) != first


def test_what_cannot_be_installed_is_said_and_leaves_nothing(
    tmp_path: Path, pip: list[tuple[list[str], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "no such version")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(NotInstalled, match=r"peer could not be installed[\s\S]*no such version"):
        python_of(PEER, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "penstock" / "peers"
