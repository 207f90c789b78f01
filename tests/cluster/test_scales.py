"""A pool follows its load, on nodes that Ray's autoscaler adds and removes.

The pool has one worker, then two, one, none and one again. Every stream stays complete.
"""

import json
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
from penstock.cluster.kubernetes import readiness_probe
from penstock.loadtests.micro.server import free_ports
from tests.support.ray_nodes import Nodes, ray_folder
from tests.support.serving import TIMEOUT_SECONDS, Serving, serving, title_of, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

ARGUMENTS = [str(SHIPPED.parent / "demo-small"), "--kv-cache-mib", "64", "--dtype", "float32"]
ARGUMENTS += ["--mixed", "1", "--min-mixed", "0", "--max-mixed", "2", "--max-num-seqs", "3"]
ARGUMENTS += ["--scale-down-seconds", "4", "--drain-seconds", "30", "--log-format", "json"]
ARGUMENTS += ["--pool-nodes", "--cpus", "1", "--gpus", "0"]
PROMPTS = [f"What is {number} plus {number + 3}?" for number in range(6)]
NUM_TOKENS = 150


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with ray_folder(monkeypatch) as folder:
        yield folder


@pytest.fixture
def nodes(folder: Path) -> Nodes:
    """A head node, whose autoscaler may add one node for the router and two for workers."""
    made = Nodes(folder)
    made.add_scaled_head({"router": 1, "mixed": 2})
    return made


@pytest.fixture
def running(folder: Path, nodes: Nodes) -> Iterator[Serving]:
    arguments = [*ARGUMENTS, "--ray-address", f"127.0.0.1:{nodes.port}"]
    with serving(arguments, free_ports(2), folder) as running:
        running.wait_for_output('"event": "serving"')
        yield running


def streamed(running: Serving, prompt: str) -> list[str]:
    """Return the text of a streamed answer, followed by its finish reason."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "seed": 1}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    url = f"http://127.0.0.1:{running.http}/v1/completions"
    pieces: list[str] = []
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_SECONDS) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            event = line.removeprefix("data: ")
            if not event or event == "[DONE]":
                continue
            chunk = json.loads(event)
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                pieces += [choice["text"], *filter(None, [choice["finish_reason"]])]
            if chunk.get("usage"):
                assert chunk["usage"]["completion_tokens"] == NUM_TOKENS
    return ["".join(pieces)]


def status(running: Serving) -> dict[str, Any]:
    reply = httpx.get(f"http://127.0.0.1:{running.admin}/status", timeout=TIMEOUT_SECONDS)
    reply.raise_for_status()
    found: dict[str, Any] = reply.json()
    return found


def size(running: Serving) -> tuple[int, int]:
    """Return the desired and the ready number of workers."""
    state = status(running)
    (pool,), (scaling,) = state["pools"], state["scaling"]["pools"]
    return scaling["desired"], pool["ready"]


def num_nodes(running: Serving) -> int:
    """Return the number of nodes that Ray's autoscaler has added for workers."""
    count = 0
    for each in running.processes():
        with suppress(psutil.Error):  # the process may end meanwhile
            count += each.name() == "raylet" and "mixed,1" in " ".join(each.cmdline())
    return count


def check_log(output: str) -> None:
    """Check that all processes log one JSON line per event, with request ids and no content."""
    events = [json.loads(line) for line in output.splitlines()]
    assert {"supervisor", "router 0", "mixed worker 0"} <= {event["from"] for event in events}
    requests = [event for event in events if event["event"] == "request"]
    sequences = [event for event in events if event["event"] == "sequence"]
    assert {event["request"] for event in requests} == {event["request"] for event in sequences}
    assert {event["answer_tokens"] for event in requests} == {NUM_TOKENS}
    assert not [prompt for prompt in PROMPTS if prompt in output]


def test_pool_and_its_nodes_follow_the_load_and_no_stream_drops(
    running: Serving, nodes: Nodes
) -> None:
    assert num_nodes(running) == 1
    expected = {prompt: streamed(running, prompt) for prompt in PROMPTS}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        # More requests than one worker has rows for: they queue, and a second worker is added.
        stopped = False

        def send_requests(number: int, prompt: str) -> None:
            while not stopped and (number < 2 or size(running) != (2, 2)):
                assert streamed(running, prompt) == expected[prompt]

        clients = [pool.submit(send_requests, *each) for each in enumerate(PROMPTS)]
        try:
            running.wait_for_output('"decision": "mixed: 1 to 2: ')
            wait_for(lambda: size(running) == (2, 2), "a second worker")
            assert num_nodes(running) == 2
            # Two clients continue. One worker is enough for them, so the other worker drains.
            running.wait_for_output('"decision": "mixed: 2 to 1: ')
            wait_for(lambda: size(running) == (1, 1), "one worker again")
            wait_for(lambda: num_nodes(running) == 1, "the removal of the empty node")
            reason = readiness_probe.not_ready_reason(nodes.leaving, TIMEOUT_SECONDS, time.time())
            assert reason == ""
        finally:
            stopped = True  # from here on, the last worker may end at any time
        for each in clients:
            each.result()
    running.wait_for_output('"decision": "mixed: 1 to 0: ')
    wait_for(lambda: size(running) == (0, 0), "no worker")
    wait_for(lambda: num_nodes(running) == 0, "the removal of the last worker's node")
    reason = "no worker serves on this node"
    wait_for(
        lambda: (
            readiness_probe.not_ready_reason(nodes.leaving, TIMEOUT_SECONDS, time.time()) == reason
        ),
        reason,
    )
    assert httpx.get(f"http://127.0.0.1:{running.http}/health").status_code == 200
    assert streamed(running, PROMPTS[0]) == expected[PROMPTS[0]], "from an empty pool"
    state = status(running)
    changes = [note["text"].split(": ")[1] for note in state["scaling"]["decisions"]]
    assert {"1 to 2", "2 to 1"} <= set(changes)
    assert changes[-2:] == ["1 to 0", "0 to 1"]
    assert state["failovers"] == 0
    assert {reason for reason, count in state["finished"].items() if count} == {"length"}
    running.interrupt()
    assert running.wait() == 0
    check_log(running.output_text)
    assert not [title for each in running.processes() if "penstock" in (title := title_of(each))]
