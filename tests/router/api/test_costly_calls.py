"""Costly calls, allowed or refused, do not disturb other calls, and their memory is returned."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc
from penstock.router.config import RouterConfig
from tests.support.api_keys import user_keys
from tests.support.memory import resident_bytes
from tests.support.served_router import Served, client_of, serving, until
from tests.support.stub_worker import StubWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
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


async def read(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> bytes:
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        return b"".join([piece async for piece in response.aiter_raw()])


async def beside_another_stream(served: Served, costly: Awaitable[bytes]) -> bytes:
    """Await a costly call while another call is streamed; check its tokens and the memory."""
    expected = await stream_tokens(served, 1000)
    before = resident_bytes()
    whole, tokens = await asyncio.gather(costly, stream_tokens(served, 1000))
    assert tokens == expected
    assert resident_bytes() - before - len(whole) < 64 << 20
    return whole


@pytest.mark.parametrize("call", CALLS)
async def test_another_stream_gets_the_same_tokens_and_memory_is_returned(
    http: httpx.AsyncClient, shared_served: Served, call: str
) -> None:
    path, body = CALLS[call]
    whole = await beside_another_stream(shared_served, read(http, path, body))
    if body.get("stream"):
        assert whole.endswith(b"data: [DONE]\n\n")
    else:
        assert len(json.loads(whole)["choices"]) in (20, 22, 23)


ZEROS = {"enum": [0] * 2_000_000}
LISTS: list[list[None]] = [[]] * 1_300_000
MESSAGE = {"model": "stub", "messages": HI}
FUNCTION = {"type": "function", "function": {"name": "f"}}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "echoed choices": (
        COMPLETIONS,
        {"prompt": [[52] * 2046] * 4, "n": 64, "echo": True, "logprobs": 20, "max_tokens": 0},
    ),
    "prompts": (COMPLETIONS, {"prompt": ["a"] * 300_000}),
    "newlines": (COMPLETIONS, {"prompt": ["\n" * 4090] * 400}),
    "logit_bias": (COMPLETIONS, {"prompt": "x", "logit_bias": dict.fromkeys(range(300_000), 1)}),
    "messages": (CHAT, {"messages": HI * 139_000}),
    "spaces": (COMPLETIONS, {"prompt": " " * 4_000_000}),
    "truncated spaces": (COMPLETIONS, {"prompt": " " * 4_000_000, "truncate_prompt_tokens": 9}),
    "response_format": (
        CHAT,
        {"messages": HI}
        | {"response_format": {"type": "json_schema", "json_schema": {"schema": ZEROS}}},
    ),
    "structural tag": (
        COMPLETIONS,
        {"prompt": "x", "response_format": {"type": "structural_tag", "structures": LISTS}},
    ),
    "choice": (CHAT, {"messages": HI, "structured_outputs": {"choice": ["a"] * 1_000_000}}),
    "empty constraints": (
        CHAT,
        {"messages": HI, "structured_outputs": dict.fromkeys(range(300_000))},
    ),
    "guided_json": (COMPLETIONS, {"prompt": "x", "guided_json": ZEROS}),
    "guided_choice": (COMPLETIONS, {"prompt": "x", "guided_choice": ["a"] * 1_000_000}),
    "tool_choice": (
        CHAT,
        {"messages": HI, "tools": [FUNCTION], "tool_choice": {**FUNCTION, "other": LISTS}},
    ),
    "output_config": (
        MESSAGES,
        {**MESSAGE, "max_tokens": 1}
        | {"output_config": {"format": {"type": "json_schema", "schema": ZEROS}}},
    ),
    "output_config of a count": (
        f"{MESSAGES}/count_tokens",
        {**MESSAGE, "output_config": {"format": {"type": "json_schema", "schema": ZEROS}}},
    ),
}
"""Calls of up to 4 MiB, the limit of a body."""


@pytest.mark.parametrize("call", REFUSED)
async def test_another_stream_is_not_disturbed_by_a_refused_call(
    http: httpx.AsyncClient, shared_served: Served, call: str
) -> None:
    path, body = REFUSED[call]
    content = json.dumps(body, separators=(",", ":")).encode()
    assert len(content) <= 4 << 20

    async def refused() -> bytes:
        response = await http.post(
            path, content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400
        return b""

    await beside_another_stream(shared_served, refused())


async def test_another_stream_is_not_disturbed_by_unknown_members_of_the_response_format(
    http: httpx.AsyncClient, shared_served: Served
) -> None:
    body = {"prompt": "x", "max_tokens": 1, "response_format": {"type": "text", "other": LISTS}}
    await beside_another_stream(shared_served, read(http, COMPLETIONS, body))


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    "start",
    [b"GET / HTTP/1.1\r\nx: ", CHUNKED + b"\r\n0\r\nx-trailer: "],
    ids=["header", "trailer"],
)
async def test_another_stream_is_not_disturbed_by_128_mib_of_one_header(
    shared_served: Served, start: bytes
) -> None:
    host, port = shared_served.router.http_address.split(":")

    async def send() -> bytes:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(start)
        sent, piece = 0, b"y" * (1 << 16)
        with suppress(ConnectionError):
            while sent < 128 << 20:
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
        writer.close()
        assert sent < 128 << 20, "the router received the whole header"
        return b""

    await beside_another_stream(shared_served, send())


@pytest.mark.parametrize("num_tokens", [64 * 2048, 4_000_000])
async def test_another_stream_is_not_disturbed_by_detokenize(
    shared_served: Served, num_tokens: int
) -> None:
    async def detokenize() -> bytes:
        async with grpc.aio.insecure_channel(shared_served.router.grpc_address) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Detokenize(pb.DetokenizeRequest(tokens=[52] * num_tokens))
            is_allowed = num_tokens == 64 * 2048
            status = grpc.StatusCode.OK if is_allowed else grpc.StatusCode.INVALID_ARGUMENT
            assert await call.code() is status
        return b""

    await beside_another_stream(shared_served, detokenize())


async def test_another_stream_is_not_disturbed_by_millions_of_choices(
    shared_served: Served,
) -> None:
    sampling = pb.Sampling(choice=pb.Choices(texts=[""] * 2_000_000))

    async def generate() -> bytes:
        async with grpc.aio.insecure_channel(shared_served.router.grpc_address) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Generate(pb.GenerateRequest(text="x", sampling=sampling))
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "the text has 8000000 bytes; at most 131072 are allowed" in await call.details()
        return b""

    await beside_another_stream(shared_served, generate())


async def test_tenant_that_fills_the_queue_does_not_keep_others_out(config: RouterConfig) -> None:
    """Calls of 64 prompts with 64 choices each fill the queue of 1,024 requests."""
    keyed = replace(config, api_keys=user_keys("greedy", "other"))
    body = {"prompt": [[5, 6]] * 64, "n": 64, "max_tokens": 1}
    async with serving(keyed, StubWorker()) as served:
        served.worker.stepping.clear()
        async with client_of(served, "greedy") as greedy, client_of(served, "other") as other:
            calls = [
                asyncio.create_task(greedy.post(COMPLETIONS, json=body, timeout=200))
                for _ in range(18)
            ]
            await until(lambda: any(call.done() for call in calls))
            assert next(call for call in calls if call.done()).result().status_code == 429
            small = asyncio.create_task(
                other.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2}, timeout=200)
            )
            open_requests = served.router.frontend.num_open_requests
            await until(lambda: served.router.frontend.num_open_requests != open_requests)
            served.worker.stepping.set()
            assert (await small).status_code == 200
            answers = await asyncio.gather(*calls)
    assert {answer.status_code for answer in answers} == {200, 429}
