"""Streams of background responses, read immediately, later, or from any event (openai's client)."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from penstock.router.api.responses import event_log
from penstock.router.api.responses.formatter import ResponsesFormatter
from penstock.router.requests.response_stream import Delta
from tests.support.api_keys import user_keys
from tests.support.openai_client import message_of
from tests.support.responses_client import (
    ADD,
    EVENTS,
    FULL,
    ResponsesModel,
    ended,
    outline,
    serving_responses,
    tokens_of,
    without_ids,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ResponsesModel]:
    async with serving_responses(tmp_path_factory.mktemp("streams")) as model:
        yield model


async def create(model: ResponsesModel, text: str = FULL, **body: Any) -> Any:
    """Return the stream of a new background response."""
    model.answer(text)
    headers = {"x-request-id": "me"}  # fixes the ids of tool calls
    call = {"model": "stub", "input": "hello", "tools": [ADD], "extra_headers": headers, **body}
    return await model.client.responses.create(background=True, stream=True, **call)


async def read(stream: Any) -> list[dict[str, Any]]:
    """Return the remaining events of a stream; check that they are valid for the client's types."""
    events = [event.to_dict() async for event in stream]
    for event in events:
        EVENTS.validate_python(event)
    return events


async def retrieved(model: ResponsesModel, name: str, **query: Any) -> list[dict[str, Any]]:
    return await read(await model.client.responses.retrieve(name, stream=True, **query))


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["sequence_number"] for event in events]


async def test_events_are_those_of_another_stream(model: ResponsesModel) -> None:
    events = await read(await create(model))
    assert numbers(events) == list(range(len(events)))
    expected = await model.events(FULL, tools=[ADD])
    names = outline(expected)
    assert outline(events) == ["created", "queued", *names[1:]]
    assert [event["response"]["status"] for event in events[:3]] == [
        *("queued", "queued", "in_progress")
    ]
    last = without_ids(events[-1]["response"])
    assert last == {**without_ids(expected[-1]["response"]), "background": True}
    found = await model.client.responses.retrieve(events[0]["response"]["id"])
    assert found.to_dict() == events[-1]["response"]


async def test_stream_is_read_again_from_any_event(model: ResponsesModel) -> None:
    events = await read(await create(model))
    name = events[0]["response"]["id"]
    assert await retrieved(model, name) == events
    for after in (0, 7, len(events) - 2, len(events) - 1, 10_000):
        assert await retrieved(model, name, starting_after=after) == events[after + 1 :]


async def test_client_that_leaves_comes_back_while_the_response_is_generated(
    model: ResponsesModel,
) -> None:
    model.served.worker.stepping.clear()
    stream = await create(model, "It is 42.")
    first = await anext(aiter(stream))
    await stream.response.aclose()
    name = first.response.id
    frontend = model.served.router.frontend
    assert frontend.num_open_requests == 1
    stream = await model.client.responses.retrieve(name, stream=True, starting_after=0)
    events = aiter(stream)
    second = await anext(events)
    assert (second.type, second.sequence_number) == ("response.queued", 1)
    assert frontend.num_open_requests == 1
    model.served.worker.stepping.set()
    rest = [event async for event in events]
    assert rest[-1].response.output_text == "It is 42."
    whole = await retrieved(model, name)
    assert numbers(whole) == [0, 1, *(event.sequence_number for event in rest)]


async def test_canceled_response_ends_its_streams(model: ResponsesModel) -> None:
    model.served.worker.stepping.clear()
    stream = await create(model)
    events = aiter(stream)
    name = (await anext(events)).response.id
    await model.client.responses.cancel(name)
    assert [event.type async for event in events] == ["response.queued"]
    assert (await model.client.responses.retrieve(name)).status == "cancelled"
    model.served.worker.stepping.set()


async def test_failed_response_ends_its_streams_with_the_error(model: ResponsesModel) -> None:
    worker = model.served.worker
    worker.submits.clear()
    worker.stepping.clear()
    stream = await create(model)
    await model.fail()
    events = await read(stream)
    assert outline(events) == ["created", "queued", "error", "failed"]
    assert numbers(events) == [0, 1, 2, 3]
    failed = await ended(model, events[-1]["response"]["id"])
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert failed.to_dict() == events[-1]["response"]


async def test_bug_makes_the_response_fail(
    model: ResponsesModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ResponsesFormatter, delta: Delta) -> Iterator[str]:
        yield "event: partial\n"
        raise ZeroDivisionError

    monkeypatch.setattr(ResponsesFormatter, "chunk", broken)
    stream = await create(model)
    name = (await anext(aiter(stream))).response.id
    assert (await ended(model, name)).status == "failed"
    raw = await model.client.responses.with_raw_response.retrieve(name, stream=True)
    text = (await raw.http_response.aread()).decode()
    assert "partial" not in text
    assert '"sequence_number":3' in text.rsplit("event: ")[-1]


async def test_events_above_the_limit_make_the_response_fail(
    model: ResponsesModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MAX_EVENT_BYTES", 20_000)
    stream = await create(model, "x" * 500)
    events = aiter(stream)
    name = (await anext(events)).response.id
    types = [event.type async for event in events]
    assert types[-2:] == ["error", "response.failed"]
    failed = await ended(model, name)
    assert failed.status == "failed"
    assert "exceed 20000 bytes" in failed.error.message


async def test_responses_without_events_are_refused_by_name(model: ResponsesModel) -> None:
    plain = await model("x")
    background = await model.client.responses.create(model="stub", input="x", background=True)
    for name in (plain.id, background.id):
        with pytest.raises(openai.BadRequestError, match="cannot be streamed") as refusal:
            await model.client.responses.retrieve(name, stream=True)
        assert refusal.value.param == "stream"
    with pytest.raises(openai.NotFoundError):
        await model.client.responses.retrieve("resp_unknown", stream=True)


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({"stream": True, "starting_after": -1}, "starting_after is '-1'"),
        ({"starting_after": 3}, "starting_after needs 'stream'"),
    ],
)
async def test_numbers_of_events_are_refused_by_name(
    model: ResponsesModel, query: dict[str, Any], problem: str
) -> None:
    response = await model("x")
    with pytest.raises(openai.BadRequestError) as refusal:
        await model.client.responses.retrieve(response.id, **query)
    assert refusal.value.param == "starting_after"
    assert problem in message_of(refusal.value)


async def test_deleted_response_has_no_events(model: ResponsesModel) -> None:
    events = await read(await create(model))
    name = events[0]["response"]["id"]
    await model.client.responses.delete(name)
    with pytest.raises(openai.NotFoundError):
        await model.client.responses.retrieve(name, stream=True)


async def test_another_tenant_does_not_see_the_events(tmp_path: Path) -> None:
    async with serving_responses(tmp_path, api_keys=user_keys("first-key", "second-key")) as model:
        mine = model.client.with_options(api_key="first-key").responses
        other = model.client.with_options(api_key="second-key").responses
        model.answer("x")
        stream = await mine.create(model="stub", input="hi", background=True, stream=True)
        name = (await read(stream))[0]["response"]["id"]
        with pytest.raises(openai.NotFoundError):
            await other.retrieve(name, stream=True)
        assert [event async for event in await mine.retrieve(name, stream=True)]


async def test_slow_reader_of_a_long_response_gets_every_event(model: ResponsesModel) -> None:
    include: Any = ["message.output_text.logprobs"]
    tokens = len(tokens_of("y" * 1500))
    stream = await create(model, "y" * 1500, include=include, top_logprobs=20, tools=[])
    events = await read(stream)
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["response"]["usage"]["output_tokens"] == tokens + 1
