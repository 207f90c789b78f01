"""A worker of two ranks: it serves, recovers from a lost rank, and cleans up when it ends."""

import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.checkpoint import SHIPPED
from penstock.loadtests.micro.server import free_ports
from penstock.loadtests.micro.start import left_in_shared_memory, shared_memory
from tests.support.serving import TIMEOUT_SECONDS, Serving, serving

MODEL = SHIPPED.parent / "demo-small"


def complete(running: Serving) -> list[str]:
    """Return the tokens of a greedy answer."""
    body: dict[str, Any] = {"model": "demo-small", "prompt": "What is 2 plus 2?", "max_tokens": 12}
    body |= {"temperature": 0, "ignore_eos": True, "logprobs": 1}
    url = f"http://127.0.0.1:{running.http}/v1/completions"
    reply = httpx.post(url, json=body, timeout=TIMEOUT_SECONDS)
    reply.raise_for_status()
    found: list[str] = reply.json()["choices"][0]["logprobs"]["tokens"]
    return found


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_worker_of_two_ranks_recovers_from_a_killed_and_a_stopped_rank() -> None:
    before = shared_memory()
    # Unix socket paths in pytest's tmp_path would be too long.
    with tempfile.TemporaryDirectory(prefix="pk-") as name:
        folder = Path(name)
        arguments = [str(MODEL), "--tp", "2", "--kv-cache-mib", "64", "--step-timeout-seconds", "8"]
        arguments += ["--crash-dump-dir", str(folder / "bundles")]
        with serving(arguments, free_ports(2), folder) as running:
            running.wait_for_output("is served after")
            answer = complete(running)
            assert len(answer) == 12
            running.find("mixed worker 0, rank 1").kill()
            running.wait_for_output("mixed worker 0: rank 1: its process died")
            running.wait_for_output("mixed worker 0: ready after", times=2)
            assert complete(running) == answer
            # Suspend one rank: the other rank blocks in a collective, and both are replaced.
            stopped = running.find("mixed worker 0, rank 1")
            stopped.suspend()
            # If the restart is slow, the request may time out.
            with suppress(httpx.HTTPStatusError):
                assert complete(running) == answer
            running.wait_for_output("mixed worker 0: ready after", times=3)
            assert complete(running) == answer
            assert "no reply for" in running.output_text or "process hung: " in running.output_text
            assert not stopped.is_running()
            running.interrupt()
            assert running.wait() == 0
            left = running.left_behind()
            assert (left["processes"], left["ports"]) == ([], [])
    assert left_in_shared_memory(before) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp", "3"], "tp 3 "),
        (["--pp", "50"], "pp 50 is more than the model's "),
        (["--tp", "2", "--ep", "2"], "ep 2 cannot be used with a model without experts"),
        (["--ep", "2"], "ep: 2 does not divide tp (1)"),
    ],
)
def test_impossible_parallel_sizes_are_refused_at_start(flags: list[str], message: str) -> None:
    command = [sys.executable, "-m", "penstock.cli", "serve", str(MODEL), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
