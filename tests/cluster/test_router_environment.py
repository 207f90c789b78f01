"""A cluster whose router runs in an environment of `requirements-router.txt` and the wheel.

`make router-environment` creates the environment and runs this test, which is skipped otherwise.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.cli.checkpoint import SHIPPED
from penstock.loadtests.micro.server import free_ports
from tests.support.ray_nodes import Nodes, ray_folder
from tests.support.serving import TIMEOUT_SECONDS, serving

ENVIRONMENT = Path(os.environ.get("ROUTER_ENVIRONMENT", "")).absolute()

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        "ROUTER_ENVIRONMENT" not in os.environ, reason="run `make router-environment`"
    ),
]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with ray_folder(monkeypatch) as folder:
        yield folder


def test_router_without_torch_serves_workers_of_the_full_environment(folder: Path) -> None:
    nodes = Nodes(folder)
    nodes.add_head()
    arguments = [str(SHIPPED), "--ray-address", f"127.0.0.1:{nodes.port}", "--pool-nodes"]
    arguments += ["--mixed", "1", "--cpus", "1", "--gpus", "0", "--kv-cache-mib", "64"]
    with serving(arguments, free_ports(2), folder) as running:
        nodes.add_router(ENVIRONMENT / "bin")
        nodes.add_worker(mixed=1)
        running.wait_for_output("is served after")
        libraries = Path(f"/proc/{running.find('penstock: router 0').pid}/maps").read_text()
        assert str(ENVIRONMENT) in libraries
        assert "torch" not in libraries
        question = {"role": "user", "content": "What is 17 plus 25?"}
        answer = httpx.post(
            f"http://127.0.0.1:{running.http}/v1/chat/completions",
            json={"model": "demo", "messages": [question], "temperature": 0},
            timeout=TIMEOUT_SECONDS,
        )
        assert "42" in answer.json()["choices"][0]["message"]["content"]
        running.interrupt(signal.SIGTERM)
        assert running.wait() == 0
