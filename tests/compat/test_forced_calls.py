"""Tests of `tool_choice` in chats: `required`, and a named function (openai's client)."""

import json
from typing import Any

import openai
import pytest

from tests.compat.test_tool_calls import ONE, SUM, TOOLS, Model, both, found
from tests.compat.test_tool_calls import model as model  # a fixture of these tests
from tests.support.openai_client import HELLO
from tests.support.tool_chats import ADD

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMED: dict[str, Any] = {
    **TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "add"}},
}
REQUIRED: dict[str, Any] = {**TOOLS, "tool_choice": "required"}
CALLS = f'[{{"name": "add", "parameters": {SUM}}}, {{"name": "add", "parameters": {SUM}}}]'


def constraint(model: Model) -> Any:
    """Return the JSON schema that the worker got."""
    wanted = model.served.worker.submits[-1].params.structured_outputs
    assert wanted.kind == "json"
    return json.loads(wanted.text)


@both
@pytest.mark.parametrize("filler", [0, 40_000])  # a body with filler is parsed in a helper process
async def test_named_function_is_called(model: Model, stream: bool, filler: int) -> None:
    body = {**NAMED, "metadata": {"x": "y" * filler}}
    (choice,) = await model(SUM, stream, **body)
    assert found(choice) == (None, None, ONE, "tool_calls")
    assert constraint(model) == ADD["function"]["parameters"]


@both
@pytest.mark.parametrize("filler", [0, 40_000])
async def test_required_calls_are_made(model: Model, stream: bool, filler: int) -> None:
    body = {**REQUIRED, "metadata": {"x": "y" * filler}}
    (choice,) = await model(CALLS, stream, **body)
    assert found(choice) == (None, None, ONE * 2, "tool_calls")
    assert constraint(model)["minItems"] == 1


async def test_one_call_is_required_if_calls_are_not_parallel(model: Model) -> None:
    await model(f"{CALLS.split('}}')[0]}}}}}]", **REQUIRED, parallel_tool_calls=False)
    assert constraint(model)["maxItems"] == 1


@both
async def test_prompt_that_begins_reasoning_does_not_hide_a_forced_call(
    model: Model, stream: bool
) -> None:
    body = {**NAMED, "extra_body": {"chat_template_kwargs": {"open": True}}}
    (choice,) = await model(SUM, stream, **body)
    assert found(choice) == (None, None, ONE, "tool_calls")


async def test_auto_forces_nothing(model: Model) -> None:
    await model("x", **TOOLS)
    assert not model.served.worker.submits[-1].params.HasField("structured_outputs")


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"continue_final_message": True}, "continue_final_message", "forces calls"),
        (
            {"tools": [{"type": "function", "function": {"name": "add", "description": "x"}}] * 2},
            "tools",
            "is also the name of another tool",
        ),
    ],
)
async def test_forced_calls_are_refused_by_name(
    model: Model, body: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as refusal:
        await model.client.chat.completions.create(
            model="stub", messages=HELLO, **{**NAMED, "extra_body": body}
        )
    assert refusal.value.param == param


async def test_schema_that_cannot_be_followed_is_refused_as_a_tool(model: Model) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {}}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError, match="/properties/a/not") as refusal:
        await model(SUM, **{**NAMED, "tools": [tool]})
    assert refusal.value.param == "tools"


async def test_forced_calls_exclude_another_form_of_the_answer(model: Model) -> None:
    body = {**NAMED, "response_format": {"type": "json_object"}}
    with pytest.raises(
        openai.BadRequestError, match="cannot be combined with a field that sets the form"
    ) as refusal:
        await model(SUM, **body)
    assert refusal.value.param == "tool_choice"


async def test_schema_that_is_too_long_is_refused(model: Model) -> None:
    parameters = {"type": "object", "description": "x" * (129 << 10)}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError, match="132130 bytes; at most 131072") as refusal:
        await model(SUM, **{**NAMED, "tools": [tool]})
    assert refusal.value.param == "tools"
