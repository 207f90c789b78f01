"""A cluster like that of the chart, on one machine: nodes are added, drained and killed."""

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.cli.checkpoint import SHIPPED
from penstock.cli.status import fetch
from penstock.cluster.kubernetes import node_drain, readiness_probe
from penstock.loadtests.micro.server import free_ports
from tests.support.api_keys import key_file
from tests.support.ray_nodes import Nodes, ray_folder
from tests.support.serving import TIMEOUT_SECONDS, Serving, serving, title_of, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

MODEL = SHIPPED.parent / "demo-small"
KEY = "a-key-from-the-file"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with ray_folder(monkeypatch) as folder:
        yield folder


def streamed(running: Serving, number: int) -> str:
    """Return the text of a long answer, followed by its finish reason."""
    body = {"prompt": f"Tell me {number} stories.", "max_tokens": 600, "temperature": 1}
    body |= {"seed": number, "ignore_eos": True, "stream": True}
    url = f"http://127.0.0.1:{running.http}/v1/completions"
    pieces: list[str] = []
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_SECONDS) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                pieces += [choice["text"], *filter(None, [choice["finish_reason"]])]
    return "".join(pieces)


def status(running: Serving) -> dict[str, Any]:
    found: dict[str, Any] = fetch(f"127.0.0.1:{running.admin}", None)
    return found


def are_ready(running: Serving) -> bool:
    return [each["state"] for each in status(running)["workers"]] == ["ready", "ready"]


def num_running(running: Serving) -> list[int]:
    return [each["numbers"]["running"] for each in status(running)["workers"]]


def raylet_of(running: Serving, resource: str) -> psutil.Process:
    (found,) = (
        each
        for each in running.processes()
        if title_of(each).partition(" ")[0].endswith("/raylet") and resource in title_of(each)
    )
    return found


def kill_node(raylet: psutil.Process) -> None:
    """Kill a node's Ray processes and everything that they host, like the loss of a machine."""
    for each in (*raylet.children(recursive=True), raylet):
        with suppress(psutil.NoSuchProcess):
            each.kill()


def test_killed_node_is_replaced_and_its_streams_continue(folder: Path) -> None:
    nodes = Nodes(folder)
    nodes.add_head()
    arguments = [str(MODEL), "--ray-address", f"127.0.0.1:{nodes.port}", "--pool-nodes"]
    arguments += ["--cpus", "0.5", "--gpus", "0", "--kv-cache-mib", "64", "--mixed", "2"]
    with serving([*arguments, "--deterministic"], free_ports(2), folder) as running:
        nodes.add_worker(router=1, mixed=1)
        nodes.add_worker(mixed=1, victim=1)
        running.wait_for_output("is served after")
        wait_for(lambda: are_ready(running), "two workers")
        expected = [streamed(running, number) for number in range(4)]
        with ThreadPoolExecutor(len(expected)) as pool:
            streams = [pool.submit(streamed, running, number) for number in range(len(expected))]
            # Each worker has two streams. If a load report was late, one worker may have three.
            wait_for(lambda: min(num_running(running)) > 0, "streams on both")
            kill_node(raylet_of(running, "victim,1"))
            assert [each.result() for each in streams] == expected
        assert 1 <= status(running)["failovers"] <= 3
        nodes.add_worker(mixed=1)
        wait_for(lambda: are_ready(running), "two workers")
        assert streamed(running, 0) == expected[0]
        running.interrupt(signal.SIGTERM)
        assert running.wait() == 0


def complete(running: Serving, key: str) -> httpx.Response:
    return httpx.post(
        f"http://127.0.0.1:{running.http}/v1/completions",
        json={"model": "demo-small", "prompt": "What is 2 plus 2?", "max_tokens": 8},
        headers={"Authorization": f"Bearer {key}"},
        timeout=TIMEOUT_SECONDS,
    )


def test_workers_wait_for_their_nodes_and_drain_when_a_node_leaves(folder: Path) -> None:
    keys = key_file(folder, KEY)
    nodes = Nodes(folder)
    nodes.add_head()
    arguments = [str(MODEL), "--ray-address", f"127.0.0.1:{nodes.port}", "--pool-nodes"]
    arguments += ["--cpus", "0.5", "--gpus", "0", "--kv-cache-mib", "64"]
    arguments += ["--api-key-file", str(keys), "--allow-weak-keys", "--drain-seconds", "20"]
    with serving(arguments, free_ports(2), folder) as running:
        for role in ("prefill", "decode"):
            running.wait_for_output(f"{role} worker 0: waiting for resources")
        nodes.add_worker()
        running.wait_for_output("is served after")
        assert complete(running, "another").status_code == 401
        assert complete(running, KEY).status_code == 200
        assert len(list(nodes.leaving.glob(f"*{node_drain.PROCESS_SUFFIX}"))) == 3
        assert (
            readiness_probe.not_ready_reason(nodes.leaving, TIMEOUT_SECONDS, time.time()) == ""
        ), "the worker has decoded a token"
        assert node_drain.drain_node(nodes.leaving, TIMEOUT_SECONDS)
        assert complete(running, KEY).status_code == 503, "the router on that node has drained, too"
        running.interrupt(signal.SIGTERM)
        assert running.wait() == 0
