"""Anthropic's /v1/messages through its official client, whole and streamed."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from pydantic import BaseModel

from penstock.common.structured_outputs import StructuredOutputs, form_after_reasoning
from penstock.protos.worker_codec import num_prompt_tokens, unpack_tokens
from penstock.router.config import RouterConfig
from tests.support.anthropic_client import ADD, HELLO, connect
from tests.support.served_router import Served, serving
from tests.support.stub_worker import StubWorker
from tests.support.tokenizers import byte_level, write_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% if thinking %}(think){% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if not loop.last or add_generation_prompt %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{# <think> #}"
)
SUM = '{"a": 17, "b": 25}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {SUM}}}\n</tool_call>'
THOUGHT = "<think>\nwhy 😀\n</think>\n\n"
FULL = f"{THOUGHT}I add.\n{CALL}\n{CALL}"
TOOLS: dict[str, Any] = {"tools": [ADD]}


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


class Animal(BaseModel):
    name: str


class Model:
    """A served model that answers with a given text."""

    def __init__(self, served: Served, client: Any) -> None:
        self.served = served
        self.client = client

    async def __call__(self, text: str, stream: bool = False, **fields: Any) -> Any:
        """Return the message; the official client assembles the message of a stream."""
        tokens = tokens_of(text)
        self.served.worker.submits.clear()
        self.served.worker.answer = lambda prompt: tokens
        call = {"model": "stub", "messages": HELLO, "max_tokens": 1000, **fields}
        call.setdefault("extra_headers", {"x-request-id": "me"})
        if not stream:
            return await self.client.messages.create(**call)
        async with self.client.messages.stream(**call) as events:
            return await events.get_final_message()

    async def events(self, text: str, **fields: Any) -> list[tuple[str, Any]]:
        """Return name and data of each event of a stream."""
        tokens = tokens_of(text)
        self.served.worker.answer = lambda prompt: tokens
        raw = await self.client.messages.with_raw_response.create(
            model="stub", messages=HELLO, max_tokens=1000, stream=True, **fields
        )
        found = []
        for event in (await raw.http_response.aread()).decode().strip().split("\n\n"):
            name, data = event.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return found

    @property
    def prompt(self) -> str:
        """The prompt of the newest request."""
        tokens = unpack_tokens(self.served.worker.submits[-1].prompt)
        return str(TOKENIZER.decode(tokens, skip_special_tokens=False))


def found(message: Any) -> list[Any]:
    """Return the content of a message, without ids and signatures, and its stop reason."""
    kept = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("name", "input")}
    blocks = [tuple(getattr(each, name) for name in kept[each.type]) for each in message.content]
    return [*blocks, message.stop_reason]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    folder: Path = tmp_path_factory.mktemp("messages") / "model"
    config = RouterConfig(write_folder(folder, TOKENIZER, TEMPLATE), "stub")
    async with serving(config, StubWorker()) as served, connect(served) as client:
        yield Model(served, client)


ONE = ("add", {"a": 17, "b": 25})
both = pytest.mark.parametrize("stream", [False, True])


@both
async def test_text(model: Model, stream: bool) -> None:
    message = await model("It is 42.", stream)
    assert found(message) == [("It is 42.",), "end_turn"]
    assert (message.type, message.role, message.model) == ("message", "assistant", "stub")
    assert message.id.startswith("msg_")
    # + 1, because the end token counts too.
    assert message.usage.output_tokens == len(tokens_of("It is 42.")) + 1
    assert message.usage.input_tokens == num_prompt_tokens(model.served.worker.submits[0])
    assert model.prompt == "[user]hello</s>[assistant]"


@both
async def test_thinking_text_and_parallel_calls_are_blocks(model: Model, stream: bool) -> None:
    message = await model(FULL, stream, **TOOLS)
    assert found(message) == [("why 😀",), ("I add.",), ONE, ONE, "tool_use"]
    ids = {each.id for each in message.content if each.type == "tool_use"}
    assert len(ids) == 2


@both
async def test_tool_choice_can_disable_parallel_calls(model: Model, stream: bool) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = await model(FULL, stream, **TOOLS, tool_choice=choice)
    assert found(message) == [("why 😀",), ("I add.",), ONE, "tool_use"]


@both
async def test_tool_choice_none_hides_the_tools(model: Model, stream: bool) -> None:
    message = await model(CALL, stream, **TOOLS, tool_choice={"type": "none"})
    assert found(message) == [(CALL,), "end_turn"]
    assert "add" not in model.prompt


@both
async def test_named_tool_is_called(model: Model, stream: bool) -> None:
    message = await model(SUM, stream, **TOOLS, tool_choice={"type": "tool", "name": "add"})
    assert found(message) == [ONE, "tool_use"]
    wanted = model.served.worker.submits[-1].params.structured_outputs
    assert json.loads(wanted.text) == ADD["input_schema"]


@both
@pytest.mark.parametrize("disable", [None, True])
async def test_any_tool_is_called(model: Model, stream: bool, disable: bool | None) -> None:
    calls = f'[{{"name": "add", "parameters": {SUM}}}, {{"name": "add", "parameters": {SUM}}}]'
    choice = {"type": "any"} | ({} if disable is None else {"disable_parallel_tool_use": disable})
    message = await model(calls, stream, **TOOLS, tool_choice=choice)
    assert found(message) == [*[ONE] * (1 if disable else 2), "tool_use"]
    schema = json.loads(model.served.worker.submits[-1].params.structured_outputs.text)
    assert schema.get("maxItems") == (1 if disable else None)


@both
async def test_stop_sequence_that_ended_the_answer_is_named(model: Model, stream: bool) -> None:
    message = await model("one two three", stream, stop_sequences=["never", "tw"])
    assert found(message) == [("one ",), "stop_sequence"]
    assert message.stop_sequence == "tw"
    message = await model(f"{CALL} tw", stream, **TOOLS, stop_sequences=["tw"])
    assert found(message) == [ONE, "stop_sequence"]


@both
async def test_call_that_is_cut_has_the_stop_reason_max_tokens(model: Model, stream: bool) -> None:
    cut = len(tokens_of(CALL[: CALL.index("5}")]))
    message = await model(CALL, stream, **TOOLS, max_tokens=cut)
    assert found(message) == [("add", {"a": 17, "b": 2}), "max_tokens"]
    assert message.usage.output_tokens == cut


@both
async def test_call_with_max_tokens_0_only_caches_its_prompt(model: Model, stream: bool) -> None:
    message = await model("It is 42.", stream, max_tokens=0)
    assert found(message) == ["max_tokens"]
    assert message.usage.output_tokens == 0
    (submit,) = model.served.worker.submits
    assert submit.params.max_tokens == 1


@both
async def test_answer_may_fill_the_context(model: Model, stream: bool) -> None:
    message = await model("a" * 9000, stream, max_tokens=20_000)
    assert message.stop_reason == "model_context_window_exceeded"
    usage = message.usage
    assert usage.input_tokens + usage.output_tokens == 2048


@both
async def test_answer_continues_the_assistants_message(model: Model, stream: bool) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "It is"}]
    message = await model(" 42.", stream, messages=begun)
    assert found(message) == [(" 42.",), "end_turn"]
    assert model.prompt == "[user]hello</s>[assistant]It is"
    # A helper process parses a large body.
    large = [{"role": "user", "content": "x " * 20_000}, begun[-1]]
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        await model(" 42.", stream, messages=large)
    await model(" 42.", stream, messages=begun, metadata={"user_id": "x" * 40_000})
    assert model.prompt == "[user]hello</s>[assistant]It is"


@both
async def test_thinking_is_hidden_if_it_is_to_be_omitted(model: Model, stream: bool) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    message = await model(f"{THOUGHT}x", stream, thinking=thinking)
    assert found(message) == [("",), ("x",), "end_turn"]
    assert message.content[0].signature


@pytest.mark.parametrize(
    ("thinking", "begins"),
    [
        (None, "[user]"),
        ({"type": "enabled", "budget_tokens": 1024}, "(think)"),
        ({"type": "adaptive"}, "(think)"),
        ({"type": "disabled"}, "[user]"),
    ],
)
async def test_thinking_reaches_the_template(model: Model, thinking: Any, begins: str) -> None:
    await model("x", max_tokens=1500, **({} if thinking is None else {"thinking": thinking}))
    assert model.prompt.startswith(begins)


async def test_events_have_the_official_order(model: Model) -> None:
    events = await model.events(FULL, **TOOLS)
    names = [name for name, _ in events]
    assert [data["type"] for _, data in events] == names
    shape: list[Any] = []
    for name, data in events:
        entry = (name, data.get("index"), data.get("delta", {}).get("type"))
        if not shape or shape[-1] != entry:
            shape.append(entry)
    delta = "content_block_delta"
    assert shape == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("ping", None, None),
        (delta, 0, "thinking_delta"),
        (delta, 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        (delta, 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        (delta, 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, None),
        (delta, 3, "input_json_delta"),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    start = dict(events)["message_start"]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["output_tokens"] == 0
    assert dict(events)["message_delta"]["delta"]["stop_reason"] == "tool_use"


async def test_empty_answer_has_no_blocks(model: Model) -> None:
    assert found(await model("")) == ["end_turn"]
    names = [name for name, _ in await model.events("")]
    assert names == ["message_start", "message_delta", "message_stop"]


@both
async def test_answer_follows_a_schema(model: Model, stream: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = await model('{"a":1}', stream, output_config=config)
    assert found(message) == [('{"a":1}',), "end_turn"]
    sent = model.served.worker.submits[-1].params.structured_outputs
    wanted = form_after_reasoning(StructuredOutputs(sent.kind, sent.text))
    assert (wanted.kind, json.loads(wanted.text)) == ("json", schema)


async def test_refusal_of_a_form_with_a_forced_call_names_the_form(model: Model) -> None:
    config = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"such as output_config\.format: leave"):
        await model(SUM, **TOOLS, tool_choice={"type": "any"}, output_config=config)


def conversations() -> Sequence[dict[str, Any]]:
    call = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "2"}
    history = [
        *HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    return (
        {},
        {"system": "be kind", **TOOLS},
        {"messages": history, **TOOLS},
        {"messages": [*HELLO, {"role": "assistant", "content": "It is"}]},
        {"thinking": {"type": "adaptive"}},
        {**TOOLS, "tool_choice": {"type": "none"}},
    )


@pytest.mark.parametrize("fields", conversations())
async def test_count_tokens_equals_the_usage_of_the_call(
    model: Model, fields: dict[str, Any]
) -> None:
    message = await model("x", **fields)
    call = {"model": "stub", "messages": HELLO, **fields}
    counted = await model.client.messages.count_tokens(**call)
    assert counted.input_tokens == message.usage.input_tokens
    assert message.usage.cache_read_input_tokens == 0


async def test_conversation_goes_on_with_the_results_of_parallel_calls(model: Model) -> None:
    first = await model(FULL, **TOOLS)
    calls = [each for each in first.content if each.type == "tool_use"]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": each.id,
            "content": [{"type": "text", "text": str(sum(each.input.values()))}],
            "is_error": index == 1,
        }
        for index, each in enumerate(calls)
    ]
    messages = [*HELLO, first.to_param(), {"role": "user", "content": results}]
    second = await model("Both are 42.", True, messages=messages, **TOOLS)
    assert found(second) == [("Both are 42.",), "end_turn"]
    assert "[tool]42</s>[tool]Error: 42</s>[assistant]" in model.prompt


async def test_class_of_the_client_defines_the_form(model: Model) -> None:
    model.served.worker.answer = lambda prompt: tokens_of('{"name":"fox"}')
    message = await model.client.messages.parse(
        model="stub", max_tokens=99, messages=HELLO, output_format=Animal
    )
    assert message.parsed_output == Animal(name="fox")


async def test_models_are_listed_and_retrieved(model: Model) -> None:
    listed = [each async for each in model.client.models.list()]
    assert [(each.id, each.type, each.display_name) for each in listed] == [
        ("stub", "model", "stub")
    ]
    assert (await model.client.models.retrieve("stub")) == listed[0]
    assert listed[0].created_at.tzinfo is not None
    assert listed[0].max_input_tokens == 2048
