"""A stream with reasoning and tool calls is the same when its worker dies at any position."""

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from penstock.router.config import RouterConfig
from tests.support.anthropic_client import ADD as ANTHROPIC_ADD
from tests.support.mortal_worker import MortalWorker, interrupted
from tests.support.served_router import Served, serving
from tests.support.tokenizers import byte_level, write_folder
from tests.support.tool_chats import ADD

TOKENIZER = byte_level()
FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
TEMPLATE = "{{ tools }}<tool_call><think>{{ messages }}"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 17, "b": "grüße 😀"}}</tool_call>'
ANSWER = f"<think>\nwhy 😀\n</think>\n\nI add.\n{CALL}\n{CALL}"
TOKENS = TOKENIZER.encode(ANSWER, add_special_tokens=False).ids
MESSAGES = [{"role": "user", "content": "sum?"}]
BODY = {
    "messages": MESSAGES,
    "tools": [ADD],
    "stream": True,
    "stream_options": {"include_usage": True},
}
ANTHROPIC_BODY = {
    "model": "stub",
    "max_tokens": 1000,
    "messages": MESSAGES,
    "tools": [ANTHROPIC_ADD],
    "stream": True,
}


async def stream_chat(served: Served) -> list[Any]:
    """Return the deltas of a stream, with consecutive texts of the same kind merged."""
    headers = {"x-request-id": "me"}
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        response = await http.post("/v1/chat/completions", json=BODY, headers=headers)
    *events, done = response.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    found: list[Any] = [last["usage"]["completion_tokens"]]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta, finish = choice["delta"], choice["finish_reason"]
        key, text = shape_of(delta)
        if found and isinstance(found[-1], list) and text is not None and found[-1][0] == key:
            found[-1][1] += text
        else:
            found.append([key, text])
        if finish:
            found.append(finish)
    return found


def shape_of(delta: dict[str, Any]) -> tuple[str, str | None]:
    """Return a delta without its text, as JSON, and the text."""
    for name in ("content", "reasoning_content"):
        if name in delta and "role" not in delta:
            return name, delta[name]
    calls = delta.get("tool_calls")
    if calls and "id" not in calls[0]:
        return f"arguments {calls[0]['index']}", calls[0]["function"]["arguments"]
    return json.dumps(delta), None


async def stream_message(served: Served) -> list[Any]:
    """Return the events of Anthropic's API, with consecutive deltas of a block merged."""
    headers = {"x-request-id": "me"}
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        response = await http.post("/v1/messages", json=ANTHROPIC_BODY, headers=headers)
    found: list[Any] = []
    for event in response.text.strip().split("\n\n"):
        data = json.loads(event.split("\ndata: ")[1])
        if data["type"] == "message_start":
            assert data["message"].pop("id").startswith("msg_")
        delta = data.get("delta", {})
        field = FIELDS.get(delta.get("type"), "")
        key, text = (data["type"], data.get("index"), field), delta.get(field)
        if field and found[-1][0] == key:
            found[-1][1] += text
        else:
            found.append([key, text if field else data])
    return found


Stream: TypeAlias = Callable[[Served], Coroutine[Any, Any, list[Any]]]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("stream", "reasoning", "finish"),
    [
        (stream_chat, ["reasoning_content", "why 😀"], "tool_calls"),
        (stream_message, [("content_block_delta", 0, "thinking"), "why 😀"], "tool_use"),
    ],
)
async def test_stream_with_calls_is_the_same_when_its_worker_dies(
    tmp_path: Path, stream: Stream, reasoning: list[Any], finish: str
) -> None:
    config = RouterConfig(write_folder(tmp_path / "model", TOKENIZER, TEMPLATE), "stub")
    async with serving(config, MortalWorker("w0", TOKENS)) as served:
        expected = await stream(served)
    text = json.dumps(expected, ensure_ascii=False).replace("\\", "")
    assert text.count('"name": "add"') == 2
    assert reasoning in expected
    assert f'"{finish}"' in text
    for position in range(1, len(TOKENS), 8):
        assert await interrupted(config, TOKENS, position, stream) == expected, position
