"""The wheel contains the product, and of the load tests only `bench` and `simulate`."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent
INSTALLED_LOADTESTS = ("bench", "simulator")

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(ROOT)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("penstock-*.whl")
    return path


def sources() -> set[str]:
    """Return the tracked files that belong in the wheel, by their path in the wheel."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    links = {path.name for path in (ROOT / "penstock").iterdir() if path.is_symlink()}
    found = set()
    for name in tracked:
        top, *below = name.split("/")
        if top == "penstock" and not (ROOT / name).is_symlink():
            found.add(name)
        elif top in links and (top != "loadtests" or below[0] in INSTALLED_LOADTESTS):
            found.add(f"penstock/{name}")
    return found


def test_wheel_contains_exactly_the_product(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    assert {name for name in names if not name.split("/")[0].endswith(".dist-info")} == sources()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["--version"], "penstock "),
        (["serve", "--help"], "usage: penstock serve"),
        (["bench", "--help"], "usage: penstock bench"),
        (["chat", "--help"], "usage: penstock chat"),
        (["simulate", "load", "--help"], "usage: penstock simulate load"),
        (["simulate", "faults", "--schedules", "2"], "2 schedules in "),
    ],
)
def test_an_installed_command_runs(
    wheel: Path, tmp_path: Path, command: list[str], expected: str
) -> None:
    ZipFile(wheel).extractall(tmp_path)
    code = "import sys, penstock.cli as cli; sys.exit(cli.main() if {} in cli.__file__ else 3)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code.format(repr(str(tmp_path))), *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
