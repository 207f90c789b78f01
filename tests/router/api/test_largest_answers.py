"""Calls with the largest allowed answers do not disturb other calls."""

import asyncio
import ctypes
import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import httpx
import psutil
import pytest
import pytest_asyncio

from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc
from tests.support.served_router import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "x"}]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "echo": (
        COMPLETIONS,
        {"prompt": [[52] * 2046] * 2, "n": 11, "echo": True, "logprobs": 20, "max_tokens": 0},
    ),
    "streamed echo": (
        COMPLETIONS,
        {"prompt": [52] * 2046, "n": 23, "echo": True, "logprobs": 20, "max_tokens": 1}
        | {"stream": True},
    ),
    "prompt logprobs": (
        COMPLETIONS,
        {"prompt": [[52] * 2000] * 20, "prompt_logprobs": 20, "max_tokens": 1},
    ),
    "chat": (
        CHAT,
        {"messages": HI, "n": 23, "max_tokens": 2000, "logprobs": True, "top_logprobs": 20},
    ),
}


@pytest_asyncio.fixture(loop_scope="module")
async def http(shared_served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shared_served.url, timeout=200) as client:
        yield client


async def stream_tokens(served: Served, num_tokens: int) -> list[int]:
    async with grpc.aio.insecure_channel(served.router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(text="other", sampling=pb.Sampling(max_tokens=num_tokens))
        return [token async for reply in stub.Generate(request) for token in reply.tokens]


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


async def read(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> bytes:
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        return b"".join([piece async for piece in response.aiter_raw()])


@pytest.mark.parametrize("call", CALLS)
async def test_another_stream_gets_the_same_tokens_and_memory_is_returned(
    http: httpx.AsyncClient, shared_served: Served, call: str
) -> None:
    path, body = CALLS[call]
    expected = await stream_tokens(shared_served, 1000)
    before = resident_bytes()
    whole, tokens = await asyncio.gather(read(http, path, body), stream_tokens(shared_served, 1000))
    assert tokens == expected
    if body.get("stream"):
        assert whole.endswith(b"data: [DONE]\n\n")
    else:
        answer = json.loads(whole)
        assert len(answer["choices"]) in (20, 22, 23)
        del answer
    del whole
    assert resident_bytes() - before < 64 << 20
