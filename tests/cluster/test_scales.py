"""A pool that follows what is asked: load, a second worker, one again, none, and woken; no stream
that is not whole."""

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.checkpoint import SHIPPED
from penstock.loadtests.server import free_ports
from tests.support.serving import PATIENCE, Serving, serving, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ARGUMENTS = [str(SHIPPED.parent / "demo-small"), "--kv-cache-mib", "64", "--dtype", "float32"]
ARGUMENTS += ["--mixed", "1", "--min-mixed", "0", "--max-mixed", "2", "--max-num-seqs", "3"]
ARGUMENTS += ["--scale-down-seconds", "4", "--drain-seconds", "30", "--log-format", "json"]
PROMPTS = [f"What is {number} plus {number + 3}?" for number in range(6)]
NUM_TOKENS = 150


@pytest.fixture
def running() -> Iterator[Serving]:
    # Not pytest's own folder: its paths are too long for the sockets that lie below.
    with (
        tempfile.TemporaryDirectory(prefix="pk-") as folder,
        serving(ARGUMENTS, free_ports(2), Path(folder)) as running,
    ):
        running.wait_until_said('"event": "serving"')
        yield running


def streamed(running: Serving, prompt: str) -> list[str]:
    """The pieces of a streamed answer, and how it ended."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "seed": 1}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    url = f"http://127.0.0.1:{running.http}/v1/completions"
    pieces: list[str] = []
    with httpx.stream("POST", url, json=body, timeout=PATIENCE) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            event = line.removeprefix("data: ")
            if not event or event == "[DONE]":
                continue
            told = json.loads(event)
            assert "error" not in told, told
            for choice in told["choices"]:
                pieces += [choice["text"], *filter(None, [choice["finish_reason"]])]
            if told.get("usage"):
                assert told["usage"]["completion_tokens"] == NUM_TOKENS
    return ["".join(pieces)]


def status(running: Serving) -> dict[str, Any]:
    reply = httpx.get(f"http://127.0.0.1:{running.http}/status", timeout=PATIENCE)
    reply.raise_for_status()
    found: dict[str, Any] = reply.json()
    return found


def size(running: Serving) -> tuple[int, int]:
    """Workers wanted, and those that are ready."""
    told = status(running)
    (pool,), (scaling,) = told["pools"], told["scaling"]["pools"]
    return scaling["desired"], pool["ready"]


def check_the_log(said: str) -> None:
    """A line an event, from everybody, with the requests' names and nothing of their content."""
    events = [json.loads(line) for line in said.splitlines()]
    assert {"supervisor", "router 0", "mixed worker 0"} <= {event["from"] for event in events}
    requests = [event for event in events if event["event"] == "request"]
    sequences = [event for event in events if event["event"] == "sequence"]
    assert {event["request"] for event in requests} == {event["request"] for event in sequences}
    assert {event["answer_tokens"] for event in requests} == {NUM_TOKENS}
    assert not [prompt for prompt in PROMPTS if prompt in said]


def test_a_pool_follows_what_is_asked_and_no_stream_drops(running: Serving) -> None:
    undisturbed = {prompt: streamed(running, prompt) for prompt in PROMPTS}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        # More than one worker has places for: they wait in line, and a second one comes.
        ends = False

        def ask(number: int, prompt: str) -> None:
            while not ends and (number < 2 or size(running) != (2, 2)):
                assert streamed(running, prompt) == undisturbed[prompt]

        asking = [pool.submit(ask, *each) for each in enumerate(PROMPTS)]
        running.wait_until_said('"decision": "mixed: 1 to 2: ')
        wait_for(lambda: size(running) == (2, 2), "a second worker")
        # Two go on, for which one worker is enough: the other one drains under them.
        running.wait_until_said('"decision": "mixed: 2 to 1: ')
        wait_for(lambda: size(running) == (1, 1), "one worker again")
        ends = True
        for each in asking:
            each.result()
    running.wait_until_said('"decision": "mixed: 1 to 0: ')
    wait_for(lambda: size(running) == (0, 0), "no worker")
    assert httpx.get(f"http://127.0.0.1:{running.http}/health").status_code == 200
    assert streamed(running, PROMPTS[0]) == undisturbed[PROMPTS[0]], "woken"
    told = status(running)
    changes = [note["text"].split(": ")[1] for note in told["scaling"]["decisions"]]
    assert {"1 to 2", "2 to 1"} <= set(changes)
    assert changes[-2:] == ["1 to 0", "0 to 1"]
    assert told["failovers"] == 0
    assert {reason for reason, count in told["finished"].items() if count} == {"length"}
    running.interrupt()
    assert running.wait() == 0
    check_the_log(running.said)
    assert running.left_behind() == {"processes": [], "ports": [], "files": []}
