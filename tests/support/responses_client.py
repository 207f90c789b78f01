"""A model behind /v1/responses that answers with a given text, and its server-sent events."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.protos import worker_pb2 as pb
from penstock.protos.worker_codec import unpack_tokens
from penstock.router.config import RouterConfig
from tests.support.openai_client import serving_with_client
from tests.support.served_router import Served, until
from tests.support.tokenizers import byte_level, write_folder

TOKENIZER = byte_level()
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}({{ c.id }} {{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}){% endfor %}"
    "</s>{% endfor %}[assistant]{{ reasoning_effort }}"
)
SUM = '{"a": 17, "b": 25}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {SUM}}}\n</tool_call>'
THOUGHT = "<think>\nwhy 😀\n</think>\n\n"
FULL = f"{THOUGHT}I add.\n{CALL}\n{CALL}"
ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def tokens_of(text: str) -> Sequence[int]:
    """Return the tokens of a text, each of about one byte."""
    tokens: Sequence[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return tokens


class ResponsesModel:
    """A served model that answers with a given text."""

    def __init__(self, served: Served, client: Any) -> None:
        self.served = served
        self.client = client

    def answer(self, text: str) -> None:
        """Set the text of all answers."""
        tokens = tokens_of(text)
        self.served.worker.answer = lambda prompt: tokens

    async def __call__(self, text: str, streams: bool = False, /, **body: Any) -> Any:
        """Return the response; for a stream, return the response in its last event."""
        self.answer(text)
        call = {"model": "stub", "input": "hello", **body}
        call.setdefault("extra_headers", {"x-request-id": "me"})
        if not streams:
            return await self.client.responses.create(**call)
        stream = await self.client.responses.create(stream=True, **call)
        *_, last = [event async for event in stream]
        return last.response

    async def fail(self) -> None:
        """Let the only request fail while its worker is paused, then resume the worker."""
        worker = self.served.worker
        await until(lambda: worker.submits)
        (submit,) = worker.submits
        step = pb.Step()
        step.ended.add(request=submit.request, attempt=submit.attempt, reason="out of memory")
        worker.send(pb.ToRouter(step=step))
        worker.runs.clear()
        worker.stepping.set()

    def prompt(self) -> str:
        """Return the prompt of the latest request."""
        return TOKENIZER.decode(unpack_tokens(self.served.worker.submits[-1].prompt))

    async def events(self, text: str, /, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a stream, each valid for the official client's types."""
        self.answer(text)
        return await events_of(self.served.url, {"input": "hello", "stream": True, **body})


async def ended(model: ResponsesModel, name: str) -> Any:
    """Return a background response once it has ended."""
    found: Any = None
    while found is None or found.status in ("queued", "in_progress"):
        found = await model.client.responses.retrieve(name)
    return found


async def events_of(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream; check their format and their numbers."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        headers = {"x-request-id": "me"}
        reply = await http.post("/v1/responses", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("}\n\n")
    events = []
    for index, frame in enumerate(reply.text[:-2].split("\n\n")):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == index
        EVENTS.validate_python(event)
        events.append(event)
    return events


def outline(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return the types of events without `response.`; repeated deltas count once."""
    found: list[str] = []
    for event in events:
        name = event["type"].removeprefix("response.")
        if not found or found[-1] != name or not name.endswith("delta"):
            found.append(name)
    return found


def without_ids(value: Any) -> Any:
    """Return a response, or a list of its items, without members that differ per response."""
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    own = ("id", "created_at", "completed_at", "item_id")
    return {name: without_ids(each) for name, each in value.items() if name not in own}


@contextlib.asynccontextmanager
async def serving_responses(folder: Path, **config: Any) -> AsyncIterator[ResponsesModel]:
    """Serve a model whose template reads tools and reasoning."""
    written = write_folder(folder / "model", TOKENIZER, TEMPLATE)
    async with serving_with_client(RouterConfig(written, "stub", **config)) as (served, client):
        yield ResponsesModel(served, client)
