"""A cluster as the chart makes it, on one machine: nodes that come later, and one that leaves."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.cli.checkpoint import SHIPPED
from penstock.cluster import leave, ready
from penstock.loadtests.server import free_ports
from tests.support.ray_nodes import Nodes, ray_folder
from tests.support.serving import PATIENCE, Serving, serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MODEL = SHIPPED.parent / "demo-small"
KEY = "a-key-of-the-file"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with ray_folder(monkeypatch) as folder:
        yield folder


def ask(running: Serving, key: str) -> httpx.Response:
    return httpx.post(
        f"http://127.0.0.1:{running.http}/v1/completions",
        json={"model": "demo-small", "prompt": "What is 2 plus 2?", "max_tokens": 8},
        headers={"Authorization": f"Bearer {key}"},
        timeout=PATIENCE,
    )


def test_it_waits_for_its_nodes_serves_there_and_drains_where_one_leaves(folder: Path) -> None:
    (folder / "keys").write_text(f"{KEY}\n")
    nodes = Nodes(folder)
    nodes.add_head()
    arguments = [str(MODEL), "--ray-address", f"127.0.0.1:{nodes.port}", "--pool-nodes"]
    arguments += ["--cpus", "0.5", "--gpus", "0", "--kv-cache-mib", "64"]
    arguments += ["--api-keys-file", str(folder / "keys"), "--drain-seconds", "20"]
    with serving(arguments, free_ports(2), folder) as running:
        for role in ("prefill", "decode"):
            running.wait_until_said(f"{role} worker 0: waiting for its place")
        nodes.add_worker()
        running.wait_until_said("is served after")
        assert ask(running, "another").status_code == 401
        assert ask(running, KEY).status_code == 200
        assert len(list(nodes.leaving.glob(f"*{leave.HOSTED}"))) == 3
        assert ready.reason_not(nodes.leaving, PATIENCE, time.time()) == "", "a token was decoded"
        assert leave.leave(nodes.leaving, PATIENCE)
        assert ask(running, KEY).status_code == 503, "the router of that node has drained too"
        running.interrupt(signal.SIGTERM)
        assert running.wait() == 0
