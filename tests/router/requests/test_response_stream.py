import asyncio

import pytest

from penstock.protos.worker_pb2 import TokenLogprobs
from penstock.router.errors import Code, ServingError
from penstock.router.requests.response_stream import (
    AnswerBuilder,
    ClientDisconnectedError,
    Delta,
    ResponseStream,
)


def delta(position: int, size: int = 1, index: int = 0, finish: str = "") -> Delta:
    tokens = list(range(position, position + size))
    text = "".join(map(str, tokens))
    return Delta(index, 0, position, tokens, text, [None] * size, finish)


async def test_unread_deltas_are_merged() -> None:
    cancelled: list[int] = []
    stream = ResponseStream(100, cancelled.extend)
    stream.add_request(1, seed=3)
    stream.add_request(2, seed=4)
    for position in range(3):
        stream.push(delta(position))
    stream.push(delta(0, index=1))
    stream.push(delta(3, finish="stop"))
    stream.request_ended(1, None)
    stream.request_ended(2, None)
    deltas = [each async for each in stream]
    assert [(each.index, each.position, list(each.tokens), each.text) for each in deltas] == [
        (0, 0, [0, 1, 2], "012"),
        (1, 0, [0], "0"),
        (0, 3, [3], "3"),
    ]
    assert deltas[-1].finish == "stop"
    assert stream.seeds == [3, 4]
    stream.close()
    assert cancelled == []


def test_logprobs_are_freed_in_parts_from_the_built_answer_too() -> None:
    builder = AnswerBuilder()
    builder.add(delta(0, size=3))
    builder.add(delta(3, size=4))
    answer = builder.build()
    parts = 0
    while builder.free_logprobs(2):
        parts += 1
        assert len(answer.logprobs) == 7 - 2 * parts
    assert (parts, len(answer.logprobs), len(answer.tokens)) == (3, 0, 7)


async def test_prompt_logprobs_are_freed_in_parts() -> None:
    stream = ResponseStream(100, lambda numbers: None)
    first, second = [TokenLogprobs()] * 3, [TokenLogprobs()] * 4
    stream.prompt_logprobs.update({0: first, 1: second})
    left = []
    while stream.free_prompt_logprobs(2):
        left.append((len(first), len(second)))
    assert left == [(3, 2), (3, 0), (1, 0)]
    assert stream.prompt_logprobs == {}
    assert not stream.free_prompt_logprobs(2)


async def test_unread_deltas_are_delivered_before_an_error() -> None:
    cancelled: list[int] = []
    stream = ResponseStream(100, cancelled.extend)
    stream.add_request(1, 0)
    stream.add_request(2, 0)
    stream.push(delta(0))
    stream.request_ended(1, ServingError(Code.INTERNAL, "broken"))
    assert cancelled == [2]  # the failed request ends the whole call, so request 2 is cancelled
    assert (await anext(stream)).position == 0
    with pytest.raises(ServingError, match="broken"):
        await anext(stream)


async def test_call_ends_if_too_many_tokens_are_unread() -> None:
    cancelled: list[int] = []
    stream = ResponseStream(10, cancelled.extend)
    stream.add_request(1, 0)
    stream.push(delta(0, size=10))
    await anext(stream)
    for position in range(10):
        stream.push(delta(position))
    assert cancelled == []
    stream.push(delta(10))
    assert cancelled == [1]
    await anext(stream)
    with pytest.raises(ServingError, match="too slowly"):
        await anext(stream)


async def test_stream_has_ended_when_the_last_delta_is_read_and_all_requests_have_ended() -> None:
    stream = ResponseStream(100, lambda requests: None)
    stream.add_request(1, 0)
    stream.push(delta(0))
    await anext(stream)
    assert not stream.has_ended  # request 1 still runs
    stream.push(delta(1))
    stream.request_ended(1, None)
    assert not stream.has_ended  # the last delta is unread
    await anext(stream)
    assert stream.has_ended
    stream.close()
    assert not stream.has_ended


async def test_closing_cancels_the_requests_once() -> None:
    cancelled: list[int] = []
    stream = ResponseStream(10, cancelled.extend)
    stream.add_request(1, 0)
    stream.close()
    stream.close()
    assert cancelled == [1]
    with pytest.raises(ClientDisconnectedError):
        await anext(stream)


async def test_writer_takes_tokens_only_while_the_reader_waits_and_nothing_is_unread() -> None:
    stream = ResponseStream(100, lambda requests: None)
    stream.add_request(1, 0)
    stream.writer = lambda *token: True
    assert stream.idle_writer is None  # no reader waits yet
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert stream.idle_writer is stream.writer
    stream.push(delta(0))
    assert stream.idle_writer is None  # the reader must first get the queued delta
    assert (await reader).position == 0
    assert stream.idle_writer is None
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert stream.idle_writer is stream.writer
    stream.fail(ServingError(Code.INTERNAL, "broken"))
    assert stream.idle_writer is None
    with pytest.raises(ServingError, match="broken"):
        await reader
