"""Limits of bodies, conversations and answers; no callback holds the event loop for long."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from penstock.router.config import RequestBounds, RouterConfig
from tests.support.openai_errors import check_form
from tests.support.responses_client import events_of
from tests.support.served_router import Served, serving
from tests.support.stub_worker import StubWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/responses"
USER = {"role": "user", "content": "x"}
FUNCTION = {"type": "function", "name": "f"}


@pytest_asyncio.fixture(loop_scope="module")
async def http(shared_served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shared_served.url, timeout=200) as client:
        yield client


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"properties": {"x": value}}
    return value


TOO_LARGE: Sequence[tuple[str, object]] = [
    ("input", [USER] * 4097),
    ("input", [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 4097}]),
    ("input", [{"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}] * 4097),
    ("input", "y" * 3_000_000),
    ("input", [{"role": "user", "content": "y" * 100}] * 4000),
    ("instructions", "y" * 3_000_000),
    ("tools", [{**FUNCTION, "name": f"f{index}"} for index in range(513)]),
    ("tools", [{**FUNCTION, "description": "y" * 600_000}]),
    ("tools", [{**FUNCTION, "parameters": nested(40)}]),
    ("tool_choice", nested(40)),
    ("text", {"format": {"type": "json_schema", "name": "x", "schema": nested(40)}}),
    ("chat_template_kwargs", {"x": "y" * 20_000}),
    ("metadata", {str(index): "x" for index in range(100_000)}),
    ("include", ["x"] * 100_000),
]


@pytest.mark.parametrize(("name", "value"), TOO_LARGE)
async def test_field_that_is_too_large_is_refused(
    http: httpx.AsyncClient, name: str, value: object
) -> None:
    reply = await http.post(PATH, json={"input": "x", name: value})
    assert reply.status_code == 400, reply.text[:200]
    error = check_form(reply)
    assert error["param"] in (name, "input")
    assert len(error["message"]) < 400


@pytest.mark.parametrize("bounds", [{"max_body_bytes": 2000}, {"max_messages": 8}])
async def test_conversation_of_stored_responses_is_bounded(
    config: RouterConfig, bounds: dict[str, int]
) -> None:
    small = replace(config, bounds=RequestBounds(**bounds))
    async with (
        serving(small, StubWorker(answer=lambda prompt: [52] * 20)) as served,
        httpx.AsyncClient(base_url=served.url, timeout=60) as client,
    ):
        previous, replies = None, []
        for _ in range(10):
            body = {"input": "y" * 300, "previous_response_id": previous}
            replies.append(await client.post(PATH, json=body))
            if replies[-1].status_code != 200:
                break
            previous = replies[-1].json()["id"]
        assert 3 < len(replies) < 8
        assert check_form(replies[-1])["param"] == "previous_response_id"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "stream", "background"])
async def test_largest_answer_does_not_hold_the_event_loop(
    shared_served: Served, http: httpx.AsyncClient, kind: str
) -> None:
    # The fixture `callback_times` fails the test if a callback takes too long.
    include = ["message.output_text.logprobs"]
    body = {"input": "x", "max_output_tokens": 1900, "include": include, "top_logprobs": 20}
    if kind == "stream":
        events = await events_of(shared_served.url, {**body, "stream": True})
        response = events[-1]["response"]
    else:
        response = (await http.post(PATH, json={**body, "background": kind != "whole"})).json()
    while response["status"] in ("queued", "in_progress"):
        response = (await http.get(f"{PATH}/{response['id']}")).json()
    assert response["usage"]["output_tokens"] == 1900
    assert len(response["output"][0]["content"][0]["logprobs"]) > 1800
    stored = await http.get(f"{PATH}/{response['id']}")
    assert stored.json() == response
    assert json.loads(stored.content)["id"] == response["id"]


async def test_long_text_without_logprobs_is_streamed_and_stored(
    shared_served: Served, http: httpx.AsyncClient
) -> None:
    body = {"input": "y" * 100, "instructions": "z" * 500, "stream": True}
    events = await events_of(shared_served.url, body)
    response = events[-1]["response"]
    assert response["usage"]["output_tokens"] > 1000
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert "".join(deltas) == response["output"][0]["content"][0]["text"]
    assert (await http.get(f"{PATH}/{response['id']}")).json() == response
