import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtests.comparison.engines import HERE, Environment
from penstock.loadtests.comparison.environments import (
    NotInstalled,
    cache_folder,
    is_installed,
    python_of,
)

PEER = Environment("peer", ("peer==1",), ("bad",), {"CMAKE_ARGS": "-DX=1"})


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """Replace pip by a stub that succeeds; return the arguments and CMAKE_ARGS of its calls."""
    calls = []

    def run(command: list[str], **options: Any) -> Any:
        calls.append((command[2:], options["env"].get("CMAKE_ARGS", "")))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(venv, "create", lambda folder, **_: folder.mkdir())
    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_penstock_uses_the_running_python(tmp_path: Path) -> None:
    assert python_of(HERE, tmp_path) == Path(sys.executable)
    assert list(tmp_path.iterdir()) == []


def test_environment_is_reused_until_its_requirements_change(
    tmp_path: Path, pip: list[tuple[list[str], str]]
) -> None:
    first = python_of(PEER, tmp_path)
    assert python_of(PEER, tmp_path) == first
    assert [command[2] for command, _ in pip] == ["install", "uninstall"]
    assert pip[0][0][-1] == "peer==1"
    assert "--no-cache-dir" in pip[0][0]
    assert pip[0][1] == "-DX=1"
    assert python_of(Environment("peer", ("peer==2",)), tmp_path) != first


def test_environment_is_installed_after_its_installation_is_complete(
    tmp_path: Path, pip: list[tuple[list[str], str]]
) -> None:
    assert is_installed(HERE, tmp_path)
    assert not is_installed(PEER, tmp_path)
    assert list(tmp_path.iterdir()) == []
    python_of(PEER, tmp_path)
    assert is_installed(PEER, tmp_path)
    assert not is_installed(Environment("peer", ("peer==2",)), tmp_path)


def test_failed_installation_is_reported_and_leaves_only_its_lock(
    tmp_path: Path, pip: list[tuple[list[str], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "no such version")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(NotInstalled, match=r"installing peer failed[\s\S]*no such version"):
        python_of(PEER, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_cache_folder_is_below_xdg_cache_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "penstock" / "peers"
