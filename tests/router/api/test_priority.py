"""The priority of a request, over HTTP and gRPC: it reaches the queue of the router."""

import grpc
import grpc.aio
import httpx
import pytest

from penstock.protos import inference_pb2, inference_pb2_grpc
from penstock.router.config import RouterConfig
from tests.support.openai_errors import check_form
from tests.support.priorities import spy_priorities
from tests.support.served_router import serving
from tests.support.stub_worker import StubWorker

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_http_priority_reaches_the_queue(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with (
        serving(config, StubWorker()) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as http,
    ):
        priorities = spy_priorities(served, monkeypatch)
        for priority in (-7, None, 3):
            response = await http.post(path, json={**BODIES[path], "priority": priority})
            assert response.status_code == 200
        assert priorities == [-7, 0, 3]


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, "high", 1.5])
async def test_wrong_http_priority_is_refused_by_name(config: RouterConfig, wrong: object) -> None:
    async with (
        serving(config, StubWorker()) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as http,
    ):
        body = {**BODIES[COMPLETIONS], "priority": wrong}
        response = await http.post(COMPLETIONS, json=body)
        assert response.status_code == 400
        assert check_form(response)["param"] == "priority"


async def test_grpc_priority_reaches_the_queue(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        serving(config, StubWorker()) as served,
        grpc.aio.insecure_channel(served.router.grpc_address) as channel,
    ):
        priorities = spy_priorities(served, monkeypatch)
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        sampling = inference_pb2.Sampling(max_tokens=1)
        request = inference_pb2.GenerateRequest(text="hi", sampling=sampling, priority=-7)
        async for _ in stub.Generate(request):
            pass
        assert priorities == [-7]
