"""pytest plugin: appends a JSON line to a file whenever a test starts or ends.

`-p penstock.loadtests.gpu.pytest_lines` loads the plugin, and PENSTOCK_TEST_LINES names the file.
If a run is stopped, its lines remain, and show which tests were running. With xdist, the process
that distributes the tests writes the lines.

A worker process of xdist exits after a test with a CUDA error, because no later test can use its
CUDA context. xdist then starts a new worker process, and reports the next test of the old process
as crashed.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "PENSTOCK_TEST_LINES"
LAST_CHARACTERS = 2000  # maximum length of the traceback in a failed test's line
CUDA_ERROR = re.compile(r"CUDA error|CUDA driver error|illegal memory access|device-side assert")


class Lines:
    """Appends lines to a file.

    Used in the process that gets the reports of all tests.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._append({"test": nodeid, "outcome": "started"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if report.failed:
            line |= {"when": report.when, "why": report.longreprtext[-LAST_CHARACTERS:]}
        self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class ExitAfterCudaError:
    """Ends a worker process of xdist after a test with a CUDA error."""

    def __init__(self) -> None:
        self._broken = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._broken |= report.failed and bool(CUDA_ERROR.search(report.longreprtext))

    @pytest.hookimpl(trylast=True)  # runs after the hook with which xdist sends the test's reports
    def pytest_runtest_logfinish(self) -> None:
        if self._broken:
            os._exit(1)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(ExitAfterCudaError())
    elif path := os.environ.get(VARIABLE):
        config.pluginmanager.register(Lines(Path(path)))
