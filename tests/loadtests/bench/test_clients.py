"""The gRPC and HTTP clients of `penstock bench` against a scripted stub server."""

import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager

import pytest

from penstock.loadtests.bench import client_http
from penstock.loadtests.bench.client_grpc import GrpcClient
from penstock.loadtests.bench.client_http import WORDS, HttpClient
from penstock.loadtests.bench.clients import (
    Api,
    Chunk,
    Client,
    RequestFailed,
    ServerUnusable,
    Target,
)
from tests.support.stub_servers import Behaviour, grpc_stub, http_stub

Stub = Callable[[Behaviour], AbstractContextManager[str]]
PROMPT = [5, 6, 7]


@pytest.fixture(params=["grpc", "completions", "chat"])
def api(request: pytest.FixtureRequest) -> Api:
    chosen: Api = request.param
    return chosen


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour()


@pytest.fixture
def address(api: Api, behaviour: Behaviour) -> Iterator[str]:
    stub: Stub = grpc_stub if api == "grpc" else http_stub
    with stub(behaviour) as address:
        yield address.removeprefix("grpc://")


@asynccontextmanager
async def opened(
    api: Api, address: str, model: str = "", key: str = "", timeout: float = 60.0
) -> AsyncIterator[Client]:
    target = Target(address, api, model, key, timeout)
    client: Client = GrpcClient(target) if api == "grpc" else HttpClient(target)
    try:
        yield client
    finally:
        await client.close()


async def read_chunks(client: Client, output_len: int = 5) -> list[Chunk]:
    return [chunk async for chunk in client.stream(PROMPT, output_len)]


async def test_an_answer_is_read(api: Api, address: str, behaviour: Behaviour) -> None:
    async with opened(api, address, key="k-1") as client:
        served = await client.describe()
        chunks = await read_chunks(client)
    assert served.model == "stub"
    assert served.vocab_size == (1000 if api == "grpc" else None)
    counts = [chunk.num_tokens for chunk in chunks if chunk.num_tokens != 0]
    assert counts == [1 if api == "grpc" else None] * 5
    assert (chunks[-1].input_len, chunks[-1].output_len) == (3, 5)
    assert behaviour.keys == ["Bearer k-1"]
    body = behaviour.bodies[0]
    if api == "grpc":
        assert behaviour.prompts == [PROMPT]
        assert (body.sampling.ignore_eos, body.sampling.max_tokens) == (True, 5)
        assert (body.sampling.HasField("temperature"), body.sampling.temperature) == (True, 0)
    else:
        assert (body["ignore_eos"], body["temperature"], body["model"]) == (True, 0, "stub")
        words = " ".join(WORDS[token] for token in PROMPT)
        assert behaviour.prompts == [
            PROMPT if api == "completions" else [{"role": "user", "content": words}]
        ]


async def test_messages_with_several_tokens(api: Api, address: str, behaviour: Behaviour) -> None:
    behaviour.per_message = 2
    async with opened(api, address) as client:
        chunks = await read_chunks(client)
    counts = [chunk.num_tokens for chunk in chunks if chunk.num_tokens != 0]
    assert counts == ([2, 2, 1] if api == "grpc" else [None] * 3)
    assert chunks[-1].output_len == 5


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "tool_calls"])
async def test_reasoning_and_tool_calls_of_a_chat_are_tokens(field: str) -> None:
    with http_stub(Behaviour(delta_field=field)) as address:
        async with opened("chat", address) as client:
            chunks = await read_chunks(client)
    assert [chunk.num_tokens for chunk in chunks if chunk.num_tokens != 0] == [None] * 5


async def test_token_without_text_arrives_with_the_finish_reason() -> None:
    with http_stub(Behaviour(delta_field="")) as address:
        async with opened("chat", address) as client:
            chunks = await read_chunks(client, output_len=1)
    # The events are: the role, the token without text, the finish reason, the usage.
    assert [chunk.num_tokens for chunk in chunks] == [0, 0, None, 0]


async def test_refused_request_fails_with_the_reason(
    api: Api, address: str, behaviour: Behaviour
) -> None:
    behaviour.refuse = 1
    async with opened(api, address) as client:
        with pytest.raises(RequestFailed, match="the queue is full") as caught:
            await read_chunks(client)
    assert str(caught.value).startswith(("RESOURCE_EXHAUSTED", "HTTP 429"))


async def test_stream_error_fails_the_request(api: Api, address: str, behaviour: Behaviour) -> None:
    behaviour.break_after = 2
    async with opened(api, address) as client:
        with pytest.raises(RequestFailed, match="the server went away"):
            await read_chunks(client)


async def test_server_crash_fails_the_request(api: Api, address: str, behaviour: Behaviour) -> None:
    behaviour.crash_after = 2
    async with opened(api, address) as client:
        with pytest.raises(RequestFailed, match=r"UNKNOWN|not completed|payload"):
            await read_chunks(client)


async def test_truncated_answer_fails_the_request(
    api: Api, address: str, behaviour: Behaviour
) -> None:
    behaviour.end_after = 2
    async with opened(api, address) as client:
        with pytest.raises(RequestFailed, match="before the answer was complete"):
            await read_chunks(client)


async def test_timeout_fails_the_request(api: Api, address: str, behaviour: Behaviour) -> None:
    behaviour.hang = True
    async with opened(api, address, timeout=0.2) as client:
        with pytest.raises(RequestFailed, match=r"DEADLINE_EXCEEDED|after 0\.2 s"):
            await read_chunks(client)


async def test_unknown_model_is_reported(api: Api, address: str) -> None:
    async with opened(api, address, model="other") as client:
        with pytest.raises(ServerUnusable, match="no model 'other'"):
            await client.describe()


@pytest.mark.parametrize("key", ["grpc", "completions"])
async def test_unreachable_server_is_reported(key: Api) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # no server listens on this port
        port = taken.getsockname()[1]
        address = f"127.0.0.1:{port}" if key == "grpc" else f"http://127.0.0.1:{port}"
        async with opened(key, address) as client:
            with pytest.raises(ServerUnusable, match=str(port)):
                await client.describe()
            with pytest.raises(RequestFailed, match=r"[Rr]efused"):
                await read_chunks(client)


async def test_timeout_of_the_connection_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_http, "_TIMEOUT_SECONDS", 0.2)
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        # These connections fill the queue of the server, which accepts none of them.
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        async with opened("completions", address) as client:
            with pytest.raises(RequestFailed, match=r"^cannot connect: no connection after 0\.2 s"):
                await read_chunks(client)


async def test_skipped_position_fails_the_request() -> None:
    with grpc_stub(Behaviour(skip=True)) as address:
        async with opened("grpc", address.removeprefix("grpc://")) as client:
            with pytest.raises(
                RequestFailed, match="at position 1, received the token at position 2"
            ):
                await read_chunks(client)
