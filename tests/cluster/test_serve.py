"""`penstock serve` end to end: start, requests, lost workers and routers, clean shutdown."""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from penstock.cli.checkpoint import SHIPPED
from penstock.cli.status import NoStatus, fetch
from penstock.loadtests.bench.resuming_client import ResumingClient
from penstock.loadtests.micro.server import free_ports
from penstock.loadtests.micro.start import left_in_shared_memory, shared_memory
from penstock.protos import inference_pb2 as pb
from penstock.protos.inference_pb2_grpc import InferenceStub
from tests.support.serving import (
    TIMEOUT_SECONDS,
    Serving,
    is_open,
    serving,
    title_of,
    wait_for,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

MODEL = SHIPPED.parent / "demo-small"
OPTIONS = ["--kv-cache-mib", "64", "--drain-seconds", "20"]
ARGUMENTS = [str(MODEL), *OPTIONS]
READY = "is served after"


@pytest.fixture
def folder() -> Iterator[Path]:
    # Unix socket paths in pytest's tmp_path would be too long.
    with tempfile.TemporaryDirectory(prefix="pk-") as name:
        yield Path(name)


@pytest.fixture
def ports() -> list[int]:
    return free_ports(2)


@pytest.fixture(scope="module")
def started() -> Iterator[Serving]:
    """A cluster with two routers, shared by several tests; a test may kill its processes."""
    # Each port is followed by another free port, which the second router uses.
    ports = free_ports(2, run=2)
    arguments = [*ARGUMENTS, "--routers", "2", "--deterministic"]
    with (
        tempfile.TemporaryDirectory(prefix="pk-") as name,
        serving(arguments, ports, Path(name)) as running,
    ):
        running.wait_for_output(READY)
        yield running


@pytest.fixture
def shared(started: Serving) -> Serving:
    """The shared cluster, after processes killed by earlier tests have been replaced."""
    wait_for(lambda: is_whole(started), "both routers to be ready with both workers")
    return started


def is_whole(running: Serving) -> bool:
    with suppress(NoStatus):
        for port in (running.admin, running.admin + 1):
            workers = fetch(f"127.0.0.1:{port}", None)["workers"]
            if [each["state"] for each in workers] != ["ready", "ready"]:
                return False
        return True
    return False


def complete(running: Serving, **more: Any) -> dict[str, Any]:
    body = {"model": "demo-small", "prompt": "What is 2 plus 2?", "max_tokens": 8, **more}
    url = f"http://127.0.0.1:{running.http}/v1/completions"
    reply = httpx.post(url, json={"temperature": 0, **body}, timeout=TIMEOUT_SECONDS)
    reply.raise_for_status()
    found: dict[str, Any] = reply.json()
    return found


@contextmanager
def stream(running: Serving, **more: Any) -> Iterator[Iterator[str]]:
    """Yield the events of a long streamed answer."""
    body = {"model": "demo-small", "prompt": "Tell me a story.", "max_tokens": 1500, **more}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    url = f"http://127.0.0.1:{running.http}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_SECONDS) as reply:
        assert reply.status_code == 200
        yield (line.removeprefix("data: ") for line in reply.iter_lines() if line)


def test_output_shows_progress_and_the_next_commands(shared: Serving) -> None:
    for title in ("router 0", "router 1", "prefill worker 0", "decode worker 0"):
        assert f"{title}: ready after" in shared.output_text
        assert shared.find(f"penstock: {title}")
    assert "decode worker 0: weights (" in shared.output_text
    assert f"curl http://127.0.0.1:{shared.http}/v1/chat/completions" in shared.output_text
    assert f"penstock chat --address 127.0.0.1:{shared.grpc}" in shared.output_text
    assert (
        f"and on http://127.0.0.1:{shared.http + 1} and 127.0.0.1:{shared.grpc + 1}"
        in shared.output_text
    )


def test_a_local_ray_starts_no_dashboard_autoscaler_or_log_monitor(shared: Serving) -> None:
    shared.find("penstock: prefill worker 0")  # wait for a worker: the raylet is then running
    started = {
        Path(word).name for each in shared.processes() for word in title_of(each).split()[:3]
    }
    assert "raylet" in started
    assert started.isdisjoint({"dashboard.py", "monitor.py", "log_monitor.py"})


def test_printed_curl_command_works(shared: Serving) -> None:
    (line,) = (line for line in shared.output_text.splitlines() if line.startswith("  curl "))
    body = json.loads(line[line.index("{") : line.rindex("}") + 1])
    url = f"http://127.0.0.1:{shared.http}/v1/chat/completions"
    reply = httpx.post(url, json=body, timeout=TIMEOUT_SECONDS)
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["finish_reason"] in ("stop", "length")


def test_completions_are_repeatable(shared: Serving) -> None:
    one, other = complete(shared), complete(shared)
    assert one["choices"][0]["text"] == other["choices"][0]["text"]
    assert one["usage"]["completion_tokens"] > 0


def test_chat_answers_each_line_of_its_input(shared: Serving) -> None:
    command = [sys.executable, "-m", "penstock.cli", "chat", "--max-tokens", "8"]
    result = subprocess.run(
        [*command, "--address", f"127.0.0.1:{shared.grpc}"],
        input="What is 2 plus 2?\n\nAnd 3 plus 3?\n",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("\n") >= 2


def test_killed_worker_is_replaced_and_its_stream_finishes_or_fails_cleanly(
    shared: Serving,
) -> None:
    give_role(shared, "prefill-0", "prefill")
    give_role(shared, "decode-0", "mixed")
    starts = shared.output_text.count("decode worker 0: ready after")
    deaths = shared.output_text.count("decode worker 0: its process died")
    victim = shared.find("penstock: decode worker 0")
    with stream(shared) as events:
        received = [next(events)]
        victim.kill()
        received += events
    ends = [json.loads(event) for event in received if event != "[DONE]"]
    finished = any(end.get("choices") and end["choices"][0]["finish_reason"] for end in ends)
    refused = [end["error"]["message"] for end in ends if "error" in end]
    assert finished or (refused and all(refused))
    shared.wait_for_output("decode worker 0: its process died", times=deaths + 1)
    shared.wait_for_output("decode worker 0: ready after", times=starts + 1)
    assert shared.find("penstock: decode worker 0").pid != victim.pid
    assert complete(shared)["usage"]["completion_tokens"] > 0
    assert role(shared, "decode-0") == "mixed", "the operator's role is kept"


def give_role(running: Serving, worker: str, role: str) -> None:
    url = f"http://127.0.0.1:{running.admin}/role"
    reply = httpx.post(url, json={"worker": worker, "role": role}, timeout=TIMEOUT_SECONDS)
    assert reply.status_code == 200, reply.text


def role(running: Serving, worker: str) -> str:
    status = httpx.get(f"http://127.0.0.1:{running.admin}/status", timeout=TIMEOUT_SECONDS).json()
    found: str = {each["worker"]: each["role"] for each in status["workers"]}.get(worker, "")
    return found


def read(stub: Any, request: pb.GenerateRequest) -> tuple[list[int], str]:
    replies = list(stub.Generate(request))
    tokens = [token for reply in replies for token in reply.tokens]
    return tokens, "".join(reply.text for reply in replies)


async def resume_after(addresses: list[str], request: pb.GenerateRequest, kill: Any) -> Any:
    """Kill a client's router in mid-stream; return the whole answer and the number of resumptions.

    The client's receive window is about a kilobyte, so that the stream cannot end before the kill,
    even if this process is slow.
    """
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    tokens: list[int] = []
    text = ""
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(each, options=window))
            for each in addresses
        ]
        client = ResumingClient([InferenceStub(channel) for channel in channels])  # type: ignore[no-untyped-call]
        async for reply in client.generate(request):
            if len(tokens) < 20 <= len(tokens) + len(reply.tokens):
                kill()
            tokens += reply.tokens
            text += reply.text
        return (tokens, text), client.num_broken


def test_killed_router_is_replaced_and_its_client_resumes_at_the_other(
    shared: Serving,
) -> None:
    def all_are_ready() -> bool:
        routers = fetch(f"127.0.0.1:{shared.admin + 1}", None)["routers"]
        return [each["state"] for each in routers] == ["ready", "ready"]

    wait_for(all_are_ready, "both routers to be listed as ready")
    addresses = [f"127.0.0.1:{shared.grpc}", f"127.0.0.1:{shared.grpc + 1}"]
    sampling = pb.Sampling(temperature=0, max_tokens=400, ignore_eos=True, logprobs=5)
    request = pb.GenerateRequest(text="Tell me a story.", sampling=sampling)
    with grpc.insecure_channel(addresses[1]) as channel:
        expected = read(InferenceStub(channel), request)  # type: ignore[no-untyped-call]
    starts = shared.output_text.count("router 0: ready after")
    deaths = shared.output_text.count("router 0: its process died")
    victim = shared.find("penstock: router 0")
    helpers = victim.children(recursive=True)
    assert helpers
    assert asyncio.run(resume_after(addresses, request, victim.kill)) == (expected, 1)
    shared.wait_for_output("router 0: its process died", times=deaths + 1)
    shared.wait_for_output("router 0: ready after", times=starts + 1)
    # `is_running` also returns True for a zombie.
    wait_for(lambda: not any(each.is_running() for each in helpers), "the end of its helpers")
    wait_for(lambda: is_open(shared.http), "the port of the new router")
    wait_for(all_are_ready, "the new router to be listed as ready")

    def answers() -> bool:
        with suppress(httpx.HTTPStatusError):
            return bool(complete(shared)["usage"]["completion_tokens"])
        return False

    wait_for(answers, "an answer through the new router")


def test_assigned_role_survives_the_router_that_accepted_it(shared: Serving) -> None:
    give_role(shared, "prefill-0", "prefill")
    wait_for(lambda: given_role(shared, 1, "prefill-0") == "prefill", "the role at both")
    starts = shared.output_text.count("router 0: ready after")
    victim = shared.find("penstock: router 0")
    give_role(shared, "prefill-0", "mixed")
    victim.kill()
    shared.wait_for_output("router 0: ready after", times=starts + 1)
    wait_for(lambda: is_open(shared.http), "the port of the new router")
    wait_for(lambda: given_role(shared, 0, "prefill-0") == "mixed", "the role at the new router")
    wait_for(lambda: given_role(shared, 1, "prefill-0") == "mixed", "the role at the other one")


def given_role(running: Serving, router: int, worker: str) -> str:
    """Return the role that an operator assigned to the worker, as this router reports it, or ""."""
    roles = fetch(f"127.0.0.1:{running.admin + router}", None)["roles"]
    return str(roles[worker]["role"]) if worker in roles else ""


def test_worker_whose_model_is_missing_is_given_up_and_the_others_serve(
    folder: Path, ports: list[int]
) -> None:
    model = folder / MODEL.name
    model.symlink_to(MODEL)
    with serving([str(model), *OPTIONS], ports, folder) as running:
        running.wait_for_output(READY)
        model.unlink()
        running.find("penstock: decode worker 0").kill()
        running.wait_for_output(
            f"decode worker 0: {model} is not a folder: give the path of a checkpoint folder; "
            "the next try is in 60 s, and the other processes continue"
        )
        url = f"http://127.0.0.1:{running.admin}/metrics"
        metric = 'penstock_workers_given_up{pool="decode"} 1.0'
        wait_for(lambda: metric in httpx.get(url, timeout=TIMEOUT_SECONDS).text, "the metric")


def test_interrupt_leaves_nothing_behind_and_a_second_start_works(
    folder: Path, ports: list[int]
) -> None:
    before = shared_memory()
    with serving(ARGUMENTS, ports, folder) as first:
        first.wait_for_output(READY)
        assert complete(first)["usage"]["completion_tokens"] > 0
        first.interrupt()
        assert first.wait() == 0
        assert "draining" in first.output_text
        assert first.output_text.endswith("stopped\n")
        assert first.left_behind() == {"processes": [], "ports": [], "files": []}
    assert left_in_shared_memory(before) == []
    with serving(ARGUMENTS, ports, folder) as second:
        second.wait_for_output(READY)
        assert complete(second)["usage"]["completion_tokens"] > 0
        check_second_signal_ends_the_drain(second)
        assert second.left_behind() == {"processes": [], "ports": [], "files": []}


def check_second_signal_ends_the_drain(running: Serving) -> None:
    """Check that a second SIGTERM ends a drain that waits for streams."""
    with stream(running, prompt=["Tell me a story."] * 16) as events:
        next(events)
        running.interrupt(signal.SIGTERM)
        running.wait_for_output("draining")

        def ended() -> bool:
            with suppress(ProcessLookupError):
                running.process.send_signal(signal.SIGTERM)
            return running.process.poll() is not None

        wait_for(ended, "the process to end")
    assert running.wait() == 130


@pytest.mark.parametrize("when", ["Ray: starting", "loading libraries"])
def test_interrupt_during_the_start_leaves_nothing_behind(
    folder: Path, ports: list[int], when: str
) -> None:
    with serving(ARGUMENTS, ports, folder) as running:
        running.wait_for_output(when)
        running.interrupt()
        assert running.wait() in (0, 130)
        assert running.output_text.endswith("stopped\n")
        assert running.left_behind() == {"processes": [], "ports": [], "files": []}


def test_loss_of_ray_ends_the_command_with_an_error(folder: Path, ports: list[int]) -> None:
    with serving(ARGUMENTS, ports, folder) as running:
        running.wait_for_output("loading libraries")
        running.find("gcs_server").kill()
        assert running.wait() == 1, running.output_text
        assert "penstock serve: Ray died" in running.output_text
        assert running.left_behind() == {"processes": [], "ports": [], "files": []}


def test_worker_without_room_ends_the_command_with_an_error(folder: Path, ports: list[int]) -> None:
    arguments = [str(MODEL), "--mixed", "1", "--gpus", "1"]
    with serving(arguments, ports, folder) as running:
        assert running.wait() == 1, running.output_text
        last = running.output_text.splitlines()[-1]
        assert last.startswith("penstock serve: no room for mixed worker 0, which needs")
        assert running.left_behind() == {"processes": [], "ports": [], "files": []}


def test_worker_that_cannot_start_ends_the_command_with_the_reason(
    folder: Path, ports: list[int]
) -> None:
    with serving([str(MODEL), "--kv-cache-mib", "1", "--mixed", "1"], ports, folder) as running:
        assert running.wait() == 1, running.output_text
        last = running.output_text.splitlines()[-1]
        assert last.startswith("penstock serve: mixed worker 0 did not start: too little memory")
        assert running.left_behind() == {"processes": [], "ports": [], "files": []}
