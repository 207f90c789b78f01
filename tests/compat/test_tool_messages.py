"""Tools in chats, and a history with `tool_calls`: the chat template gets all of both."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from penstock.protos.worker_codec import unpack_tokens
from penstock.router.config import RouterConfig
from tests.support.openai_client import HELLO, serving_with_client
from tests.support.tokenizers import byte_level, id_of, write_folder
from tests.support.tool_chats import ADD, CALL, HISTORY, RENDERED, TEMPLATE

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()


class Prompts:
    """Sends chats and returns the prompts that the worker gets."""

    def __init__(self, served: Any, client: Any) -> None:
        self.served = served
        self.client = client

    async def __call__(self, messages: Any = HELLO, **more: Any) -> str:
        self.served.worker.submits.clear()
        await self.client.chat.completions.create(
            model="stub", messages=messages, max_tokens=1, **more
        )
        (submit,) = self.served.worker.submits
        return str(TOKENIZER.decode(unpack_tokens(submit.prompt), skip_special_tokens=False))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def prompt(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prompts]:
    folder: Path = tmp_path_factory.mktemp("tools") / "model"
    config = RouterConfig(write_folder(folder, TOKENIZER, TEMPLATE), "stub")
    async with serving_with_client(config) as (served, client):
        yield Prompts(served, client)


PLAIN = "[user  ]hello</s>"


async def test_history_with_tool_calls_and_results_reaches_the_template(prompt: Prompts) -> None:
    assert await prompt(HISTORY) == RENDERED


@pytest.mark.parametrize("filler", [0, 40_000])
async def test_tools_reach_the_template_as_sent(prompt: Prompts, filler: int) -> None:
    # A body that contains the filler is parsed in a helper process.
    metadata = {"metadata": {"x": "y" * filler}}
    found = await prompt(tools=[ADD], extra_body=metadata)
    assert found == json.dumps([ADD]) + PLAIN


@pytest.mark.parametrize("filler", [0, 40_000])
async def test_documents_reach_the_template_as_sent(prompt: Prompts, filler: int) -> None:
    documents = [{"title": "t", "text": "x"}]
    body = {"documents": documents, "metadata": {"x": "y" * filler}}
    assert await prompt(extra_body=body) == json.dumps(documents) + PLAIN


async def test_model_does_not_see_tools_that_it_must_not_call(prompt: Prompts) -> None:
    assert await prompt(tools=[ADD], tool_choice="none") == PLAIN


async def test_parts_of_a_tools_result_are_joined(prompt: Prompts) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    result = {"role": "tool", "tool_call_id": "1", "content": parts}
    assert await prompt([result]) == "[tool  1]a\nb</s>"


async def test_reasoning_is_also_read_under_vllms_name(prompt: Prompts) -> None:
    message = {"role": "assistant", "content": "x", "reasoning": "why"}
    assert await prompt([message]) == "[assistant  ]<why>x</s>"


async def test_tool_calls_cannot_write_control_tokens(prompt: Prompts) -> None:
    function = {"name": "f", "arguments": '{"q": "\\u003c/s\\u003e"}'}
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
    assert await prompt([message]) == "[assistant  ](1 f q=</s>)</s>"
    (submit,) = prompt.served.worker.submits
    # The only </s> of the prompt is the one that the template writes.
    assert unpack_tokens(submit.prompt).count(id_of(TOKENIZER, "</s>")) == 1


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def function(**more: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **more}}]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "custom"}]}, "tools", "tools.0.type must be 'function', not 'custom'"),
    ({"tools": [{"type": "function"}]}, "tools", "tools.0.function must be an object"),
    ({"tools": function(name="")}, "tools", "tools.0.function.name must have 1 to 128"),
    ({"tools": function(name="a b")}, "tools", "tools.0.function.name must have 1 to 128"),
    ({"tools": function() * 2}, "tools", "tools.1.function.name is 'f', which is also"),
    ({"tools": function(parameters=[])}, "tools", "tools.0.function.parameters must be"),
    ({"tools": function(strict="yes")}, "tools", "tools.0.function.strict must be a boolean"),
    ({"tools": [1]}, "tools", "tools.0: Input should be"),
    ({"tools": [deep(70)]}, "tools", "tools is nested more than 64 levels deep"),
    ({"tools": function(description="x" * (600 << 10))}, "tools", "at most 524288 are allowed"),
    ({"tools": [ADD] * 513}, "tools", "tools has 513 tools; at most 512 are allowed"),
    (
        {"documents": [{}] * 1025},
        "documents",
        "documents has 1025 documents; at most 1024 are allowed",
    ),
    ({"documents": ["x"]}, "documents", "documents.0: Input should be"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", "tool_choice must be 'none', 'auto',"),
    (
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "tool_choice names 'g', but no function in 'tools' has this name",
    ),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
async def test_wrong_tools_are_refused_by_name(
    prompt: Prompts, body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await prompt(extra_body=body)
    assert refusal.value.param == param
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "tool", "content": "x"}, "no tool_call_id"),
        ({"role": "tool", "content": "x", "name": "f"}, "no tool_call_id"),
        ({"role": "tool", "tool_call_id": "1"}, "no content"),
        (
            {"role": "user", "content": "x", "tool_calls": [CALL]},
            "has tool_calls, which only the role",
        ),
        (
            {"role": "user", "content": "x", "reasoning_content": "y"},
            "has reasoning_content, which only the role 'assistant' may have",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls.0.function"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "type 'custom'"),
        ({"role": "assistant", "tool_calls": [CALL] * 4097}, "4097 tool calls; at most 4096"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "function", "content": "x", "name": "f"}, "role must be one of"),
    ],
)
async def test_wrong_messages_of_tools_are_refused(
    prompt: Prompts, message: dict[str, Any], why: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as refusal:
        await prompt([message])
    assert refusal.value.param == "messages"


async def test_tools_are_refused_if_the_template_does_not_read_them(client: Any) -> None:
    for body in ({"tools": [ADD]}, {"documents": [{"text": "x"}]}):
        (name,) = body
        with pytest.raises(openai.BadRequestError, match=f"does not read {name}") as refusal:
            await client.chat.completions.create(model="stub", messages=HELLO, extra_body=body)
        assert refusal.value.param == name


async def test_tokenize_shows_the_prompt_with_tools(prompt: Prompts) -> None:
    await prompt(HISTORY, tools=[ADD])
    (submit,) = prompt.served.worker.submits
    body = {"messages": HISTORY, "tools": [ADD]}
    found = await prompt.client.post("/../tokenize", body=body, cast_to=object)
    assert found["tokens"] == unpack_tokens(submit.prompt)
