"""Runs a scheduler in a separate process, under the Python interpreter of its environment."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import penstock
from penstock.loadtests.comparison.engines import BY_NAME
from penstock.loadtests.comparison.environments import cache_folder, python_of
from penstock.loadtests.micro.ab_runner import MeasurementFailed
from penstock.loadtests.micro.scheduler.cells import Cell

_ADAPTERS = Path(__file__).parent / "adapters"
_LAST_WORDS = 1500  # characters of stderr that an error contains


class Scheduler:
    """A running scheduler process. `about` is the description that its adapter returned."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", words: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._words = words  # file with the stderr of the process
        self.about: dict[str, Any] = self._answer()["about"]

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Measure a cell and return the result of `host.drive`.

        Raises MeasurementFailed if the process exited.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(cell)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._words.seek(max(0, self._words.seek(0, os.SEEK_END) - _LAST_WORDS))
            words = self._words.read().decode(errors="replace").strip()
            raise MeasurementFailed(f"{self.name} exited; end of its output:\n{words}")
        return dict(json.loads(line))


def interpreters() -> dict[str, Path]:
    """Return the Python interpreter of each side. vLLM is installed first if it is missing.

    Raises NotInstalled.
    """
    vllm = BY_NAME["vllm"].environment
    return {
        "on_penstock": Path(sys.executable),
        "on_vllm": python_of(vllm, cache_folder()),
    }


@contextmanager
def started(adapter: str, python: Path) -> Iterator[Scheduler]:
    """Run a scheduler process, which is killed on exit.

    Raises MeasurementFailed if it does not start.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    variables.pop("PYTHONPATH", None)
    # Makes the process import Penstock from this tree, not from a package.
    if python == Path(sys.executable):
        variables["PYTHONPATH"] = str(Path(penstock.__file__).parent.parent)
    with (
        tempfile.TemporaryFile() as words,
        subprocess.Popen(
            [str(python), str(_ADAPTERS / "host.py"), adapter],
            env=variables,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Scheduler(adapter, process, words)
        finally:
            process.kill()
