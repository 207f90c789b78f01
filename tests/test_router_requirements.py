"""The packages in requirements-router.txt are enough to run a router."""

import asyncio
import json
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import AsyncIterator

import pytest

from penstock.cli.checkpoint import SHIPPED
from penstock.loadtests.micro.stub_workers import StubWorker
from tests.support.only_router import (
    REQUIREMENTS,
    Blocker,
    distribution_name,
    installed_with,
    requirements,
)

ROOT = REQUIREMENTS.parent
ABSENT = ("torch", "triton", "numba", "llvmlite", "transformers")


def test_each_requirement_is_one_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(requirements(REQUIREMENTS.read_text())) <= set(project["dependencies"])


def test_requirements_install_no_package_that_computes() -> None:
    names = map(distribution_name, requirements(REQUIREMENTS.read_text()))
    assert not installed_with(names) & set(ABSENT)


@pytest.mark.parametrize("name", ABSENT)
def test_packages_that_compute_are_blocked(name: str) -> None:
    blocker = Blocker(installed_with({"ray", "tokenizers"}))
    with pytest.raises(ImportError, match=f"{name} is not a package of requirements"):
        blocker.find_spec(name, None)
    assert blocker.find_spec("ray", None) is None


@pytest.fixture
async def worker() -> AsyncIterator[StubWorker]:
    worker = StubWorker("stub", 0.01, token=lambda run: run.position % 100)
    await worker.start()
    yield worker
    await worker.stop()


async def test_router_answers_with_only_its_requirements(worker: StubWorker) -> None:
    settings = {"model": str(SHIPPED), "workers": {"stub": worker.address}}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.only_router"),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(json.dumps(settings).encode() + b"\n")
    line = await process.stdout.readline()
    assert line, (await process.stderr.read()).decode()
    answer = await asyncio.to_thread(_complete, json.loads(line)["http"])
    assert answer["usage"]["completion_tokens"] == 4
    process.stdin.close()
    assert await process.wait() == 0


def _complete(address: str) -> dict[str, dict[str, int]]:
    """Send a short chat over HTTP and return the answer."""
    body = {"model": "stub", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        found: dict[str, dict[str, int]] = json.load(reply)
    return found
