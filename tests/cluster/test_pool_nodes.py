"""A cluster as the chart makes it, on one machine: nodes that come later, and one that leaves."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.cli.checkpoint import SHIPPED
from penstock.cluster import leave
from penstock.loadtests.server import free_ports
from tests.support.serving import PATIENCE, Serving, serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MODEL = SHIPPED.parent / "demo-small"
KEY = "a-key-of-the-file"


class Nodes:
    """Nodes of Ray, each made by `ray start`, all found and ended as `Serving` finds its own."""

    def __init__(self, folder: Path) -> None:
        self.port, self._client = free_ports(2)
        self._folder = folder
        self.leaving = folder / "leave"
        self.leaving.mkdir()

    def add(self, *arguments: str) -> None:
        common = ["--node-ip-address=127.0.0.1", "--object-store-memory=83886080"]
        # Any that are free: Ray's own range for its workers may hold the ports chosen here.
        common += ["--min-worker-port=0", "--max-worker-port=0"]
        command = [str(Path(sys.executable).with_name("ray")), "start", *arguments, *common]
        more = {"TMPDIR": str(self._folder / "t"), leave.FOLDER: str(self.leaving)}
        for _ in range(3):  # Ray gives a node 30 s to start, which on a busy machine may be little
            done = subprocess.run(
                command, env={**os.environ, **more}, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return
        raise AssertionError(done.stdout + done.stderr)

    def add_head(self) -> None:
        own = [f"--port={self.port}", f"--ray-client-server-port={self._client}"]
        own += [f"--temp-dir={self._folder / 'r'}", "--include-dashboard=false", "--num-cpus=0"]
        self.add("--head", *own)

    def add_worker(self) -> None:
        resources = '--resources={"router": 1, "prefill": 1, "decode": 1}'
        self.add(f"--address=127.0.0.1:{self.port}", "--num-cpus=2", "--num-gpus=0", resources)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 2)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")  # several nodes on 127.0.0.1
    with tempfile.TemporaryDirectory(prefix="pn-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def ask(running: Serving, key: str) -> httpx.Response:
    return httpx.post(
        f"http://127.0.0.1:{running.http}/v1/completions",
        json={"model": "demo-small", "prompt": "What is 2 plus 2?", "max_tokens": 8},
        headers={"Authorization": f"Bearer {key}"},
        timeout=PATIENCE,
    )


def test_it_waits_for_its_nodes_serves_there_and_drains_where_one_leaves(folder: Path) -> None:
    (folder / "keys").write_text(f"{KEY}\n")
    (folder / "t").mkdir()
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
        assert leave.leave(nodes.leaving, PATIENCE)
        assert ask(running, KEY).status_code == 503, "the router of that node has drained too"
        running.interrupt(signal.SIGTERM)
        assert running.wait() == 0
