"""Both clients against a stub that answers as told."""

import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager

import pytest

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
def told() -> Behaviour:
    return Behaviour()


@pytest.fixture
def address(api: Api, told: Behaviour) -> Iterator[str]:
    stub: Stub = grpc_stub if api == "grpc" else http_stub
    with stub(told) as address:
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


async def answered(client: Client, output_len: int = 5) -> list[Chunk]:
    return [chunk async for chunk in client.stream(PROMPT, output_len)]


async def test_an_answer_is_read(api: Api, address: str, told: Behaviour) -> None:
    async with opened(api, address, key="k-1") as client:
        served = await client.describe()
        chunks = await answered(client)
    assert served.model == "stub"
    assert served.vocab_size == (1000 if api == "grpc" else None)
    brought = [chunk.num_tokens for chunk in chunks if chunk.num_tokens != 0]
    assert brought == [1 if api == "grpc" else None] * 5
    assert (chunks[-1].input_len, chunks[-1].output_len) == (3, 5)
    assert told.keys == ["Bearer k-1"]
    body = told.bodies[0]
    if api == "grpc":
        assert told.prompts == [PROMPT]
        assert (body.sampling.ignore_eos, body.sampling.max_tokens) == (True, 5)
        assert (body.sampling.HasField("temperature"), body.sampling.temperature) == (True, 0)
    else:
        assert (body["ignore_eos"], body["temperature"], body["model"]) == (True, 0, "stub")
        words = " ".join(WORDS[token] for token in PROMPT)
        assert told.prompts == [
            PROMPT if api == "completions" else [{"role": "user", "content": words}]
        ]


async def test_messages_with_several_tokens(api: Api, address: str, told: Behaviour) -> None:
    told.per_message = 2
    async with opened(api, address) as client:
        chunks = await answered(client)
    brought = [chunk.num_tokens for chunk in chunks if chunk.num_tokens != 0]
    assert brought == ([2, 2, 1] if api == "grpc" else [None] * 3)
    assert chunks[-1].output_len == 5


async def test_a_refused_request(api: Api, address: str, told: Behaviour) -> None:
    told.refuse = 1
    async with opened(api, address) as client:
        with pytest.raises(RequestFailed, match="the queue is full") as caught:
            await answered(client)
    assert str(caught.value).startswith(("RESOURCE_EXHAUSTED", "HTTP 429"))


async def test_a_server_that_goes_away(api: Api, address: str, told: Behaviour) -> None:
    told.break_after = 2
    async with opened(api, address) as client:
        with pytest.raises(RequestFailed, match="the server went away"):
            await answered(client)


async def test_a_server_that_crashes(api: Api, address: str, told: Behaviour) -> None:
    told.crash_after = 2
    async with opened(api, address) as client:
        with pytest.raises(RequestFailed, match=r"UNKNOWN|not completed|payload"):
            await answered(client)


async def test_an_answer_cut_short_is_no_answer(api: Api, address: str, told: Behaviour) -> None:
    told.end_after = 2
    async with opened(api, address) as client:
        with pytest.raises(RequestFailed, match="ended before the answer did"):
            await answered(client)


async def test_a_request_that_takes_too_long(api: Api, address: str, told: Behaviour) -> None:
    told.hang = True
    async with opened(api, address, timeout=0.2) as client:
        with pytest.raises(RequestFailed, match=r"DEADLINE_EXCEEDED|within 0\.2 s"):
            await answered(client)


async def test_a_model_that_is_not_there(api: Api, address: str) -> None:
    async with opened(api, address, model="other") as client:
        with pytest.raises(ServerUnusable, match="no model 'other'"):
            await client.describe()


@pytest.mark.parametrize("key", ["grpc", "completions"])
async def test_nobody_listens(key: Api) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        port = taken.getsockname()[1]
        address = f"127.0.0.1:{port}" if key == "grpc" else f"http://127.0.0.1:{port}"
        async with opened(key, address) as client:
            with pytest.raises(ServerUnusable, match=str(port)):
                await client.describe()
            with pytest.raises(RequestFailed, match=r"[Rr]efused"):
                await answered(client)


async def test_a_position_left_out_is_seen() -> None:
    with grpc_stub(Behaviour(skip=True)) as address:
        async with opened("grpc", address.removeprefix("grpc://")) as client:
            with pytest.raises(RequestFailed, match="position 2 came where 1 was to come"):
                await answered(client)
