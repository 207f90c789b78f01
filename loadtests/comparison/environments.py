"""Virtual environments in the user's cache folder, installed by pip on first use."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.loadtests.comparison.engines import Environment

_COMPLETE = "complete"  # name of a file that marks the installation as complete
_LOG_TAIL = 600  # characters of pip's log that an error shows


class NotInstalled(RuntimeError):
    """Raised if an engine's environment could not be installed.

    The message gives the environment and the reason.
    """


def cache_folder() -> Path:
    """Return the folder in which environments and checkpoints are cached."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path.home() / ".cache") / "penstock" / "peers"


def python_of(environment: Environment, cache: Path) -> Path:
    """Return the environment's interpreter.

    The environment is installed first if it is missing. Raises NotInstalled.
    """
    if not environment.requirements:
        return Path(sys.executable)
    folder = _folder(environment, cache)
    python = folder / "bin" / "python"
    with _locked(folder):
        if not (folder / _COMPLETE).exists():
            try:
                _install(environment, folder, python)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    return python


def is_installed(environment: Environment, cache: Path) -> bool:
    """Return True if `python_of` would install nothing."""
    return not environment.requirements or (_folder(environment, cache) / _COMPLETE).exists()


def _folder(environment: Environment, cache: Path) -> Path:
    return cache / f"{environment.name}-{_mark(environment)}"


def _mark(environment: Environment) -> str:
    """Return a hash of the environment's definition and the Python version."""
    inputs = (*environment.requirements, *environment.unwanted, *sorted(environment.build.items()))
    return hashlib.sha256(repr((inputs, sys.version_info[:2])).encode()).hexdigest()[:12]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a file lock, so that concurrent runs do not install the same environment twice."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(environment: Environment, folder: Path, python: Path) -> None:
    print(f"{environment.name}: installing into {folder} (minutes)", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True, symlinks=True)
    variables = {**os.environ, **environment.build, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # pip caches wheels by name and version only. Do not use the cache if the build has variables,
    # because a cached wheel may have been built with other variables.
    kept = ["--no-cache-dir"] if environment.build else []
    pip = [str(python), "-m", "pip", "--no-input"]
    _run(environment, [*pip, "install", *kept, "--quiet", *environment.requirements], variables)
    if environment.unwanted:
        _run(environment, [*pip, "uninstall", "--quiet", "-y", *environment.unwanted], variables)
    (folder / _COMPLETE).touch()


def _run(environment: Environment, command: list[str], variables: dict[str, str]) -> None:
    done = subprocess.run(
        command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        words = "\n".join(lines).strip()[-_LOG_TAIL:]
        raise NotInstalled(f"installing {environment.name} failed; output of pip:\n{words}")
