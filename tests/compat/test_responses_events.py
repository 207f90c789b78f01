"""The order and content of the events of streamed responses."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.failing_steps import fail_after
from tests.support.responses_client import (
    ADD,
    CALL,
    FULL,
    SUM,
    THOUGHT,
    ResponsesModel,
    outline,
    serving_responses,
    tokens_of,
)
from tests.support.served_router import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEGIN = ["created", "in_progress"]
ITEM = ["output_item.added", "content_part.added"]
DONE = ["content_part.done", "output_item.done"]
MESSAGE = [*ITEM, "output_text.delta", "output_text.done", *DONE]
REASONING = [*ITEM, "reasoning_text.delta", "reasoning_text.done", *DONE]
FUNCTION = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]
ORDERS: Sequence[tuple[str, list[str]]] = [
    ("It is 42.", MESSAGE),
    ("", [each for each in MESSAGE if each != "output_text.delta"]),
    (f"{THOUGHT}x", [*REASONING, *MESSAGE]),
    (CALL, FUNCTION),
    (FULL, [*REASONING, *MESSAGE, *FUNCTION, *FUNCTION]),
    (f"{CALL}\nx", [*FUNCTION, *MESSAGE]),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ResponsesModel]:
    async with serving_responses(tmp_path_factory.mktemp("events")) as model:
        yield model


def of_kind(events: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == f"response.{kind}"]


@pytest.mark.parametrize(("text", "items"), ORDERS)
async def test_events_come_in_openais_order(
    model: ResponsesModel, text: str, items: list[str]
) -> None:
    events = await model.events(text, tools=[ADD])
    assert outline(events) == [*BEGIN, *items, "completed"]


async def test_events_of_an_item_have_its_ids_and_texts(model: ResponsesModel) -> None:
    events = await model.events(FULL, tools=[ADD])
    response = events[-1]["response"]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == response["output"][event["output_index"]]["id"]
            assert event.get("content_index", 0) == 0
    for kind, texts in (("reasoning_text", ["why 😀"]), ("output_text", ["I add."])):
        done = [event["text"] for event in of_kind(events, f"{kind}.done")]
        deltas = "".join(event["delta"] for event in of_kind(events, f"{kind}.delta"))
        assert done == texts == [deltas]
    arguments = of_kind(events, "function_call_arguments.done")
    assert [event["arguments"] for event in arguments] == [SUM, SUM]
    parts = [event["part"] for event in of_kind(events, "content_part.done")]
    assert [part["text"] for part in parts] == ["why 😀", "I add."]
    items = [event["item"] for event in of_kind(events, "output_item.done")]
    assert items == response["output"]


async def test_first_events_have_the_response_in_progress(model: ResponsesModel) -> None:
    events = await model.events("x", instructions="be brief")
    for event in events[:2]:
        response = event["response"]
        assert (response["status"], response["output"], response["usage"]) == (
            "in_progress",
            [],
            None,
        )
        assert response["instructions"] == "be brief"
    assert events[-1]["response"]["id"] == events[0]["response"]["id"]


async def test_limited_answer_ends_with_incomplete(model: ResponsesModel) -> None:
    events = await model.events("It is 42.", max_output_tokens=3)
    assert outline(events) == [*BEGIN, *MESSAGE, "incomplete"]
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert of_kind(events, "output_item.done")[0]["item"]["status"] == "incomplete"


async def test_call_that_is_cut_is_incomplete(model: ResponsesModel) -> None:
    most = len(tokens_of(CALL)) - 20
    events = await model.events(CALL, tools=[ADD], max_output_tokens=most)
    assert outline(events) == [*BEGIN, *FUNCTION, "incomplete"]
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    assert SUM.startswith(item["arguments"])


async def test_logprobs_are_in_the_deltas_and_in_the_done_events(model: ResponsesModel) -> None:
    include = ["message.output_text.logprobs"]
    events = await model.events(f"{THOUGHT}It is 😀.", include=include, top_logprobs=1)
    (done,) = of_kind(events, "output_text.done")
    deltas = of_kind(events, "output_text.delta")
    assert [entry for event in deltas for entry in event["logprobs"]] == done["logprobs"]
    text = b"".join(bytes(entry["bytes"]) for entry in done["logprobs"]).decode()
    assert text == done["text"] == "It is 😀."


async def test_failed_stream_ends_with_error_and_failed(
    model: ResponsesModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after(model.served.worker, 4, monkeypatch)
    events = await model.events("It is 42.")
    assert outline(events) == [*BEGIN, *ITEM, "output_text.delta", "error", "failed"]
    error, failed = events[-2:]
    response = failed["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": error["message"]}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "It is "


async def test_client_that_leaves_ends_the_request(model: ResponsesModel) -> None:
    model.answer("x" * 500)
    model.served.worker.stepping.clear()
    frontend = model.served.router.frontend
    async with httpx.AsyncClient(base_url=model.served.url) as http:
        body = {"input": "hello", "stream": True}
        calling = asyncio.create_task(http.post("/v1/responses", json=body))
        await until(lambda: frontend.num_open_requests)
        calling.cancel()
        await until(lambda: not frontend.num_open_requests)
    model.served.worker.stepping.set()
