import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from penstock.loadtests.comparison.routers.client import check_answer, read_streams
from penstock.loadtests.comparison.routers.openai_stub import OpenAiStub


@pytest.fixture
async def stub() -> AsyncIterator[OpenAiStub]:
    server = OpenAiStub(step_seconds=0.001)
    await server.start()
    yield server
    await server.stop()


def request(length: int, *headers: str, **fields: object) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": length, **fields}).encode()
    lines = ["POST /v1/completions HTTP/1.1", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


async def open_to(stub: OpenAiStub) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = stub.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def test_every_token_is_one_event_and_one_chunk(stub: OpenAiStub) -> None:
    load = await read_streams(stub.address, 8, 20)
    assert load.check(20) == 8 * 21  # each of the 8 streams also has an end mark
    assert all(answer.start < answer.first <= answer.last for answer in load.answers)
    assert not stub.streams


async def test_answer_of_one_token_ends_at_once(stub: OpenAiStub) -> None:
    stub.step_seconds = 3600.0
    assert (await read_streams(stub.address, 1, 1)).check(1) == 2


async def test_connection_serves_one_request_after_the_other(stub: OpenAiStub) -> None:
    reader, writer = await open_to(stub)
    body = request(3, stream=True)
    writer.write(body[:30])
    await asyncio.sleep(0)
    writer.write(body[30:])
    first = await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.write(request(2, "Connection: close", stream=True))
    second = await reader.read()
    assert check_answer(first, 3) == 4
    assert check_answer(second, 2) == 3
    writer.close()


async def test_health_checks_and_whole_answers_are_json(stub: OpenAiStub) -> None:
    reader, writer = await open_to(stub)
    writer.write(b"GET /health HTTP/1.1\r\n\r\n" + request(3))
    replies = []
    for _ in range(2):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.split("Content-Length: ")[1].split("\r\n")[0])
        replies.append(json.loads(await reader.readexactly(length)))
    assert replies[0]["data"][0]["id"] == "stub"
    assert replies[1]["choices"][0]["text"] == " a a a"
    writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"?\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
async def test_other_protocols_are_refused_and_closed(stub: OpenAiStub, data: bytes) -> None:
    reader, writer = await open_to(stub)
    writer.write(data)
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_client_that_disconnects_ends_its_stream(stub: OpenAiStub) -> None:
    stub.step_seconds = 0.001
    _, writer = await open_to(stub)
    writer.write(request(1_000_000, stream=True))
    async with asyncio.timeout(60):
        while not stub.streams:
            await asyncio.sleep(0.001)
        writer.close()
        while stub.streams:
            await asyncio.sleep(0.001)
