"""Each field of Anthropic's client: the values that are accepted, refused, and sent to a worker.

`test_messages_types.py` compares the tables with the client's types.
"""

import typing
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import types

from penstock.router.config import RouterConfig
from tests.compat.test_messages import TEMPLATE, TOKENIZER
from tests.support.anthropic_client import ADD, HELLO, connect, message_of
from tests.support.served_router import Served, serving
from tests.support.stub_worker import StubWorker
from tests.support.tokenizers import write_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

CACHE = {"type": "ephemeral", "ttl": "1h"}
SCHEMA = {"type": "object", "properties": {}}
CALL = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "2"}


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def after_call(*blocks: Any, call: Any = CALL) -> list[Any]:
    """Return a conversation with a tool call, followed by a user message of these blocks."""
    return [*HELLO, {"role": "assistant", "content": [call]}, *user(*blocks)]


def tool(**fields: Any) -> list[Any]:
    return [{**ADD, **fields}]


def format_of(**fields: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "schema": SCHEMA, **fields}}


ACCEPTED: list[tuple[str, object]] = [
    ("cache_control", CACHE),
    ("cache_control", None),
    ("container", None),
    ("diagnostics", None),
    ("inference_geo", None),
    ("max_tokens", 0),
    ("max_tokens", 1),
    ("max_tokens", 1_000_000),
    ("messages", user({"type": "text", "text": "x", "cache_control": CACHE, "citations": None})),
    ("messages", [{"role": "system", "content": "x"}, *HELLO]),
    ("messages", after_call({**RESULT, "is_error": True, "cache_control": CACHE})),
    ("messages", after_call(RESULT, call={**CALL, "caller": {"type": "direct"}})),
    ("messages", [*HELLO, {"role": "assistant", "content": []}]),
    ("metadata", {"user_id": "me"}),
    ("metadata", {}),
    ("model", "stub"),
    ("output_config", {}),
    ("output_config", {"effort": None, "format": None}),
    ("output_config", format_of()),
    ("service_tier", "auto"),
    ("service_tier", "standard_only"),
    ("speed", "standard"),
    ("stop_sequences", ["x"] * 16),
    ("stop_sequences", []),
    ("stream", False),
    ("system", "be kind"),
    ("system", [{"type": "text", "text": "be kind", "cache_control": CACHE}]),
    ("temperature", 0),
    ("temperature", 1.0),
    ("thinking", {"type": "disabled"}),
    ("thinking", {"type": "adaptive", "display": "summarized"}),
    ("thinking", {"type": "enabled", "budget_tokens": 1024, "display": None}),
    ("tool_choice", {"type": "none"}),
    ("tool_choice", {"type": "auto", "disable_parallel_tool_use": False}),
    ("tools", []),
    ("tools", tool(type="custom", cache_control=CACHE, strict=False)),
    ("tools", tool(strict=True)),
    ("tools", tool(eager_input_streaming=True, defer_loading=False, allowed_callers=["direct"])),
    ("tools", tool(input_examples=[{"a": 1}])),
    ("top_k", 5),
    ("top_p", 0.5),
]
REFUSED: list[tuple[str, object]] = [
    ("cache_control", {"type": "permanent"}),
    ("cache_control", {"type": "ephemeral", "ttl": "1d"}),
    ("container", "container_1"),
    ("diagnostics", {"previous_message_id": "msg_1"}),
    ("inference_geo", "us"),
    ("max_tokens", -1),
    ("max_tokens", None),
    ("max_tokens", 2.0),
    ("messages", None),
    ("messages", []),
    ("messages", [{"role": "tool", "content": "x"}]),
    ("messages", [{"role": "user", "content": "x", "name": "n"}]),
    ("messages", user()),
    ("messages", user({"type": "text"})),
    ("messages", user({"type": "text", "text": "x", "citations": [{"type": "char_location"}]})),
    ("messages", user({"type": "text", "text": "x", "index": 1})),
    ("messages", user({"type": "image", "source": {"type": "url", "url": "http://127.0.0.1"}})),
    ("messages", user({"type": "document", "source": {"type": "text", "data": "x"}})),
    ("messages", user(RESULT)),  # a result must follow a call
    ("messages", user({"type": "thinking", "thinking": "x", "signature": "x"})),
    ("messages", after_call({**RESULT, "content": [{"type": "image", "source": {}}]})),
    ("messages", after_call({**RESULT, "toolset_name": "browser"})),
    ("messages", after_call(RESULT, call={**CALL, "caller": {"type": "code_execution_20250825"}})),
    ("messages", after_call(RESULT, call={**CALL, "toolset_name": "browser"})),
    ("messages", after_call(RESULT, call={**CALL, "input": "{}"})),
    ("messages", after_call()[:-1]),  # ends with an assistant message without text
    ("metadata", {"user_id": 5}),
    ("metadata", {"trace": "x"}),
    ("model", None),
    ("model", 7),
    ("output_config", {"effort": "high"}),  # this chat template does not read the effort
    ("output_config", {"format": {"type": "json_object"}}),
    ("output_config", format_of(strict=True)),
    ("output_config", format_of(schema={"not": {}})),
    ("output_config", format_of(schema=5)),
    ("service_tier", "priority"),
    ("speed", "fast"),
    ("stop_sequences", "x"),
    ("stop_sequences", [""]),
    ("stop_sequences", ["x"] * 17),
    ("stop_sequences", ["x" * 257]),
    ("stream", "true"),
    ("system", 5),
    ("system", [{"type": "image", "source": {}}]),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("thinking", {"type": "between_tools"}),
    ("thinking", {"type": "enabled"}),
    ("thinking", {"type": "enabled", "budget_tokens": 1023}),
    ("thinking", {"type": "enabled", "budget_tokens": 5000}),  # the budget exceeds max_tokens
    ("thinking", {"type": "adaptive", "budget_tokens": 1024}),
    ("thinking", {"type": "disabled", "display": "omitted"}),
    ("tool_choice", {"type": "any"}),  # refused without `tools`
    ("tool_choice", {"type": "tool"}),
    ("tool_choice", {"type": "auto", "name": "add"}),
    ("tool_choice", {"type": "none", "disable_parallel_tool_use": True}),
    ("tool_choice", "auto"),
    ("tools", tool(name="a b")),
    ("tools", [ADD, ADD]),
    ("tools", tool(input_schema={"type": "string"})),
    ("tools", tool(input_schema=None)),
    ("tools", tool(description=5)),
    ("tools", tool(eager_input_streaming=False)),
    ("tools", tool(defer_loading=True)),
    ("tools", tool(allowed_callers=["code_execution_20250825"])),
    ("tools", tool(parameters={})),
    ("tools", [{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}]),
    ("tools", [{"type": "bash_20250124", "name": "bash"}]),
    ("top_k", -5),
    ("top_k", 1.5),
    ("top_p", 0),
    ("top_p", 1.5),
    # Cases: fields that the client's types do not have.
    ("an_unknown_field", {"a": [1]}),
    ("context_management", {"edits": []}),
    ("mcp_servers", []),
    ("output_format", {"type": "json_schema", "schema": SCHEMA}),
]
ONLY_MESSAGES = {
    *("container", "diagnostics", "inference_geo", "max_tokens", "metadata", "service_tier"),
    *("stop_sequences", "stream", "temperature", "top_k", "top_p"),
}
OLDER = {"temperature", "top_k", "top_p"}
"""Fields that the client no longer names."""

HEADERS = {"user_profile_id", "workspace_id"}
"""Fields that the client sends as headers, which are ignored."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder: Path = tmp_path_factory.mktemp("fields") / "model"
    config = RouterConfig(write_folder(folder, TOKENIZER, TEMPLATE), "stub")
    async with serving(config, StubWorker()) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: Served) -> AsyncIterator[Any]:
    async with connect(served) as client:
        yield client


def named(rows: list[tuple[str, object]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r:.60}") for name, value in rows]


async def send(client: Any, name: str, value: object) -> Any:
    body = {"model": "stub", "messages": HELLO, "max_tokens": 1100, name: value}
    create = client.messages.create
    return await create(messages=(), model="", max_tokens=1, extra_body=body)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"max_tokens": -7}, "max_tokens is -7"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens is 9"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            "thinking.budget_tokens is 2000: it must be less than max_tokens, which is 1100",
        ),
    ],
)
async def test_refusal_names_the_given_value(
    client: Any, body: dict[str, object], problem: str
) -> None:
    ((name, value),) = body.items()
    with pytest.raises(anthropic.BadRequestError, match=problem):
        await send(client, name, value)


async def count(client: Any, name: str, value: object) -> Any:
    body = {"model": "stub", "messages": HELLO, name: value}
    return await client.messages.count_tokens(messages=(), model="", extra_body=body)


@pytest.mark.parametrize(("name", "value"), named(ACCEPTED))
async def test_field_is_accepted(client: Any, name: str, value: object) -> None:
    message = await send(client, name, value)
    assert message.stop_reason
    if name not in ONLY_MESSAGES:
        assert (await count(client, name, value)).input_tokens == message.usage.input_tokens


@pytest.mark.parametrize(("name", "value"), named(REFUSED))
async def test_value_is_refused_by_the_fields_name(
    client: Any, served: Served, name: str, value: object
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refusal:
        await send(client, name, value)
    assert name in message_of(refusal.value)
    assert served.worker.submits == []


@pytest.mark.parametrize("name", sorted(ONLY_MESSAGES))
async def test_count_tokens_refuses_fields_of_messages(client: Any, name: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=name):
        await count(client, name, 1)


@pytest.mark.parametrize("filler", [0, 40_000])  # a body with filler is parsed in a helper process
async def test_sampling_fields_reach_the_worker(client: Any, served: Served, filler: int) -> None:
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "max_tokens": 9}
    body = {**fields, "metadata": {"user_id": "x" * filler}}
    await client.messages.create(model="stub", messages=HELLO, max_tokens=9, extra_body=body)
    params = served.worker.submits[0].params
    assert {name: getattr(params, name) for name in fields} == fields


def types_in(union: Any) -> set[str]:
    """Return the literal values of `type` of each member of a union of typed dictionaries."""
    found: set[str] = set()
    for member in typing.get_args(union):
        for literal in typing.get_args(typing.get_type_hints(member)["type"]):
            found |= {literal} if isinstance(literal, str) else set(typing.get_args(literal))
    return found


TEXT = {"type": "text", "text": "x"}


@pytest.mark.parametrize("kind", sorted(types_in(types.ContentBlockParam)))
async def test_each_type_of_block_is_honoured_or_refused_by_name(client: Any, kind: str) -> None:
    honoured: dict[str, Any] = {
        "text": user(TEXT),
        "thinking": [
            *HELLO,
            {
                "role": "assistant",
                "content": [{"type": kind, "thinking": "why", "signature": "s"}, TEXT],
            },
        ],
        "redacted_thinking": [
            *HELLO,
            {"role": "assistant", "content": [{"type": kind, "data": "x"}, TEXT]},
        ],
        "tool_use": after_call(RESULT),
        "tool_result": after_call(RESULT),
    }
    if kind in honoured:
        assert (await send(client, "messages", honoured[kind])).stop_reason
        return
    with pytest.raises(anthropic.BadRequestError, match=f"messages.0.content.0: .* '{kind[:40]}'"):
        await send(client, "messages", user({"type": kind, "anything": 1}))


@pytest.mark.parametrize("kind", sorted(types_in(types.ToolUnionParam) - {"custom"}))
async def test_each_type_of_servers_tool_is_refused_by_name(client: Any, kind: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=f"tools.0.type '{kind[:40]}'"):
        await send(client, "tools", [{"type": kind, "name": "x", "anything": 1}])
