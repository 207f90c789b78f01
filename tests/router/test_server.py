"""Starting, draining and stopping a router."""

import asyncio
import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc.aio
import httpx
import psutil
import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.common.text.token_bytes import UnsupportedTokenizer
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.protos import inference_pb2, inference_pb2_grpc
from penstock.protos.worker_codec import unpack_tokens
from penstock.router.config import RouterConfig
from penstock.router.errors import Code, ServingError
from penstock.router.requests.request import GenerationRequest
from penstock.router.server import (
    UNBOUNDED,
    PortInUseError,
    bind_grpc,
    read_model_limits,
    serve_router,
)
from tests.support.pickle_bomb import PickleBomb, send_raw
from tests.support.served_router import serving, until
from tests.support.stub_worker import StubWorker
from tests.support.tokenizers import byte_level, write_folder

LONG = {"prompt": "hi", "max_tokens": 2000}


@pytest.mark.parametrize("which", ["http_port", "grpc_port", "admin_port"])
async def test_a_port_in_use_is_named(config: RouterConfig, which: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ports = {"http_port": 0, "grpc_port": 0, which: port}
        with pytest.raises(PortInUseError, match=f"port {port}: Address already in use"):
            await serve_router(replace(config, **ports))
    assert len(asyncio.all_tasks()) == 1  # only this test's own task is left
    router = await serve_router(replace(config, **ports))
    assert str(port) in (router.http_address + router.grpc_address + router.admin_address)
    await router.stop()


async def test_a_grpc_port_that_was_taken_after_its_check_is_named(config: RouterConfig) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortInUseError) as failure:
            bind_grpc(grpc.aio.server(), replace(config, host="127.0.0.1", grpc_port=port))
    assert f"127.0.0.1 port {port}: gRPC failed to bind the port" in str(failure.value)
    assert "choose another port, or stop that process" in str(failure.value)


async def test_restarted_router_can_bind_the_same_ports(config: RouterConfig) -> None:
    async with serving(config, StubWorker()) as served:
        ports = [
            int(a.rsplit(":", 1)[1])
            for a in (
                served.router.http_address,
                served.router.grpc_address,
                served.router.admin_address,
            )
        ]
        async with httpx.AsyncClient(base_url=served.url) as http:
            await http.get("/health")
    again = await serve_router(
        replace(config, http_port=ports[0], grpc_port=ports[1], admin_port=ports[2])
    )
    await again.stop()


def write_config(folder: Path, text: str) -> RouterConfig:
    write_folder(folder, byte_level())
    (folder / "config.json").write_text(text)
    return RouterConfig(folder, "m")


@pytest.mark.parametrize(
    ("text", "max_model_len", "vocab_size"),
    [
        ('{"max_position_embeddings": 64, "vocab_size": 1000}', 64, 1000),
        ('{"text_config": {"max_position_embeddings": 32, "vocab_size": 9}}', 32, 9),
        (
            '{"max_position_embeddings": 64, "vocab_size": 9, "rope_scaling": {"type": "yarn", '
            '"factor": 4.0, "original_max_position_embeddings": 48}}',
            192,
            9,
        ),
        ("{}", UNBOUNDED, byte_level().get_vocab_size()),
    ],
)
def test_model_limits_are_read_from_the_model_config(
    tmp_path: Path, text: str, max_model_len: int, vocab_size: int
) -> None:
    config = write_config(tmp_path, text)
    limits = read_model_limits(config, ModelTokenizer(tmp_path))
    assert (limits.max_model_len, limits.vocab_size) == (max_model_len, vocab_size)
    small = read_model_limits(replace(config, max_model_len=16), ModelTokenizer(tmp_path))
    assert small.max_model_len == 16


@pytest.mark.parametrize(
    ("text", "words"), [("{", "not valid JSON"), ("[]", "does not contain a JSON object")]
)
async def test_broken_model_config_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        await serve_router(replace(write_config(tmp_path, text), http_port=0, grpc_port=0))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json"):
        await serve_router(RouterConfig(tmp_path, "m", http_port=0, grpc_port=0))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


async def test_stopped_router_leaves_no_process(config: RouterConfig) -> None:
    before = children()
    router = await serve_router(replace(config, http_port=0, grpc_port=0, admin_port=0))
    assert len(children() - before) == 1 + config.helpers.num_processes
    await router.stop()
    assert children() <= before


async def test_template_that_is_not_valid_is_refused_at_the_start(tmp_path: Path) -> None:
    before = children()
    folder = write_folder(tmp_path, byte_level(), template="{% if %}")
    with pytest.raises(UnsupportedTokenizer, match="the chat template is not valid"):
        await serve_router(RouterConfig(folder, "m", http_port=0, grpc_port=0, admin_port=0))
    assert children() <= before


async def test_smaller_limits_of_a_worker_take_effect(config: RouterConfig) -> None:
    worker = StubWorker()
    worker.welcome.max_model_len = 20
    worker.welcome.vocab_size = 300
    async with serving(config, worker) as served:
        model = served.router.frontend.model
        assert (model.max_model_len, model.vocab_size) == (20, 300)
        await served.router.set_workers({})
        await until(lambda: served.router.frontend.model.max_model_len == 2048)


async def test_a_worker_of_another_model_is_not_used(config: RouterConfig) -> None:
    other = StubWorker("w1")
    other.welcome.model = "another"
    async with serving(config, StubWorker()) as served, other:
        addresses = {worker.name: worker.address for worker in (*served.workers, other)}
        await served.router.set_workers(addresses)
        await until(lambda: len(other.hellos) >= 2)
        assert [view.worker for view in served.router.frontend.workers()] == ["w0"]


async def test_worker_of_another_kv_layout_is_used_and_a_message_is_logged(
    config: RouterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    other = StubWorker("w1")
    other.welcome.layout = "stub float32"
    async with serving(config, StubWorker()) as served, other:
        addresses = {worker.name: worker.address for worker in (*served.workers, other)}
        await served.router.set_workers(addresses)
        await until(lambda: len(served.router.frontend.workers()) == 2)
    (message,) = [each.message for each in caplog.records if "exchange KV blocks" in each.message]
    assert "worker w1 and worker w0" in message
    assert "give both the same kv_cache_dtype (not float32 and stub), dtype" in message


async def test_drain_finishes_running_requests_and_refuses_new_ones(config: RouterConfig) -> None:
    worker = StubWorker(step_seconds=0.002)
    async with (
        serving(config, worker) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as http,
        grpc.aio.insecure_channel(served.router.grpc_address) as channel,
    ):
        body = {"prompt": "hi", "max_tokens": 50}
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: worker.runs)
        draining = asyncio.create_task(served.router.drain(20))
        await until(served.router.frontend.why_not_ready)
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert (await http.get("/health")).json() == {"status": "the router is draining"}
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Generate(inference_pb2.GenerateRequest(text="x")).read()
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        await draining
        answer = await running
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 50


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_call_that_is_being_checked_is_answered_or_refused(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """A drain waits for the call; a stop refuses it."""
    async with (
        serving(config, StubWorker()) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as http,
    ):
        frontend, checked = served.router.frontend, asyncio.Event()

        async def check_late(requests: object) -> None:
            await checked.wait()

        monkeypatch.setattr(frontend._admission._checker, "check", check_late)
        call = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi"}))
        await until(lambda: frontend.num_open_requests == 1)
        if is_stopped:
            await frontend.stop()
            checked.set()
            assert (await call).status_code == 503
            return
        draining = asyncio.create_task(served.router.drain(20))
        await until(frontend.why_not_ready)
        assert not draining.done()
        checked.set()
        await draining
        assert (await call).status_code == 200
    assert frontend.num_open_requests == 0


async def test_drain_times_out_and_stop_ends_the_remaining_requests_with_503(
    config: RouterConfig,
) -> None:
    worker = StubWorker(step_seconds=0.01)
    async with (
        serving(config, worker) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as http,
    ):
        whole = asyncio.create_task(http.post("/v1/completions", json=LONG))
        stream = asyncio.create_task(http.post("/v1/completions", json={**LONG, "stream": True}))
        await until(lambda: len(worker.runs) == 2)
        await until(lambda: all(run.num_new > 2 for run in worker.runs.values()))
        await served.router.drain(0.05)
        assert served.router.frontend.num_open_requests == 2
        await served.router.stop()
        assert (await whole).status_code == 503
        events = (await stream).text.strip().split("\n\n")
        assert json.loads(events[-2][6:])["error"]["code"] == 503
        assert worker.runs == {}


async def test_no_token_is_lost_when_a_worker_is_lost(config: RouterConfig) -> None:
    first, second = StubWorker("w0", step_seconds=0.005), StubWorker("w1", step_seconds=0.005)
    async with (
        serving(config, first, second) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as http,
    ):
        body = {"prompt": "hi", "max_tokens": 60, "return_token_ids": True, "stream": True}
        response = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: first.runs or second.runs)
        busy, spare = (first, second) if first.runs else (second, first)
        await until(lambda: next(iter(busy.runs.values())).num_new > 5)
        await busy.stop()
        served.router.worker_died(busy.name)
        events = (await response).text.strip().split("\n\n")[:-1]
        choices = [json.loads(event[6:])["choices"][0] for event in events]
        tokens = [token for choice in choices for token in choice["token_ids"]]
        prompt = choices[0]["prompt_token_ids"]
        assert tokens == spare.answer(prompt)[:60]
        assert len(unpack_tokens(spare.submits[0].log[0].tokens)) >= 5


async def test_submit_refuses_all_requests_if_one_is_invalid(config: RouterConfig) -> None:
    async with serving(config, StubWorker()) as served:
        frontend = served.router.frontend
        for bad in (
            GenerationRequest([]),
            GenerationRequest([5], SamplingParams(stop=("",))),
            GenerationRequest([5], timeout=0.0),
        ):
            with pytest.raises(ServingError) as refusal:
                await frontend.submit([GenerationRequest([5]), bad])
            assert refusal.value.code is Code.INVALID
        assert frontend.num_open_requests == 0
        assert served.worker.submits == []


async def test_pickles_sent_to_the_ports_are_not_loaded(
    config: RouterConfig, tmp_path: Path
) -> None:
    bomb = PickleBomb(tmp_path / "loaded")
    async with serving(config, StubWorker()) as served, httpx.AsyncClient() as http:
        router = served.router
        for address in (router.http_address, router.grpc_address, router.admin_address):
            await send_raw(address, bomb.data)
        for url in (f"{served.url}/v1/completions", f"{served.admin_url}/role"):
            json_type = {"content-type": "application/json"}
            reply = await http.post(url, content=bomb.data, headers=json_type)
            assert reply.status_code == 400
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await channel.unary_unary("/penstock.v1.Inference/Tokenize")(bomb.data)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not bomb.was_loaded()
        assert (await http.get(f"{served.url}/health")).status_code == 200


def test_router_does_not_import_heavy_libraries() -> None:
    """Importing the server loads none of the engine's libraries, so routers start quickly."""
    heavy = ("torch", "ray", "transformers", "pandas", "numba")
    code = f"import sys, penstock.router.server; print(sys.modules.keys() & {set(heavy)})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
