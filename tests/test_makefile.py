"""`make setup` installs the package only if the requirements have changed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = ("Makefile", "pyproject.toml", "constraints.txt")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def checkout(folder: Path) -> Path:
    """Return a folder with copies of the files that `make setup` reads."""
    folder.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


def num_installations(folder: Path, environment: Path) -> int:
    """Run `make setup`; return how often the environment's `pip install --editable` ran so far."""
    subprocess.run(["make", "setup"], cwd=folder, check=True, capture_output=True)
    return (environment / "calls").read_text().count("--editable")


def test_worktree_with_the_same_requirements_installs_nothing(tmp_path: Path) -> None:
    main = checkout(tmp_path / "main")
    (main / ".venv" / "bin").mkdir(parents=True)
    python = main / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {main}/.venv/calls\n')
    python.chmod(0o755)
    assert num_installations(main, main / ".venv") == 1
    worktree = checkout(tmp_path / "worktree")
    (worktree / ".venv").symlink_to(main / ".venv")
    later = (main / ".venv" / ".penstock-installed").stat().st_mtime + 100
    for name in FILES:
        os.utime(worktree / name, (later, later))
    assert num_installations(worktree, main / ".venv") == 1
    (worktree / "constraints.txt").write_text("torch==0.0\n")
    assert num_installations(worktree, main / ".venv") == 2
