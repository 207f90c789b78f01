"""`strict` tools: if the model decides to call, the arguments fit the schema (3 clients).

The tests use the bundled model. Without a constraint, the model would write `4821 * 377`, which the
schemas here do not allow.
"""

import json
import re
from typing import Any

import anthropic
import openai
import pytest

from tests.compat.test_bundled_tools import LOOKUP
from tests.compat.test_bundled_tools import module_served as module_served  # a fixture
from tests.compat.test_bundled_tools import served as served  # a fixture
from tests.support.anthropic_client import connect
from tests.support.served_router import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: list[Any] = [{"role": "user", "content": "What is 4821 * 377?"}]
SUMS: dict[str, Any] = {
    "type": "object",
    "properties": {"expression": {"type": "string", "pattern": "^[0-9]{1,4} [+] [0-9]{1,4}$"}},
    "required": ["expression"],
    "additionalProperties": False,
}
SUM = re.compile(r"\d{1,4} \+ \d{1,4}")
NAME = "calculator"
DESCRIPTION = "Evaluates an arithmetic expression."


def tools(strict: bool = True, parameters: Any = SUMS) -> list[Any]:
    """Return tools in OpenAI's form; only the first one may be strict."""
    function = {"name": NAME, "description": DESCRIPTION, "parameters": parameters}
    return [{"type": "function", "function": {**function, "strict": strict}}, LOOKUP]


async def ask(client: Any, **fields: Any) -> Any:
    call = {"model": "demo", "messages": ASK, "temperature": 0, "max_completion_tokens": 100}
    return await client.chat.completions.create(**{**call, **fields})


def expression(call: Any) -> str:
    """Return the argument of the call in an answer of chat completions."""
    assert call.function.name == NAME
    return str(json.loads(call.function.arguments)["expression"])


async def test_call_of_a_chat_fits_the_schema(client: Any) -> None:
    answer = (await ask(client, tools=tools(), tool_choice="auto")).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert SUM.fullmatch(expression(call))
    async with client.chat.completions.stream(
        model="demo", messages=ASK, temperature=0, tools=tools(), max_completion_tokens=100
    ) as stream:
        final = (await stream.get_final_completion()).choices[0]
    assert final.message.tool_calls[0].function.arguments == call.function.arguments


async def test_call_without_strict_is_the_models_own(client: Any) -> None:
    answer = (await ask(client, tools=tools(strict=False))).choices[0]
    assert expression(answer.message.tool_calls[0]) == "4821 * 377"


async def test_calls_of_other_functions_and_text_are_free(client: Any) -> None:
    question = [{"role": "user", "content": "What is the entry of K7X2?"}]
    answer = (await ask(client, tools=tools(), messages=question)).choices[0]
    assert answer.message.tool_calls[0].function.name == "lookup"
    question = [{"role": "user", "content": "Which day comes two days after Monday?"}]
    whole = await ask(client, tools=tools(), messages=question)
    loose = await ask(client, tools=tools(strict=False), messages=question)
    assert whole.choices[0].message.content == loose.choices[0].message.content
    assert whole.usage.completion_tokens == loose.usage.completion_tokens


async def test_form_of_the_answer_excludes_calls(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["no"]}}}
    answer = (await ask(client, tools=tools(), response_format=form)).choices[0]
    assert (answer.message.content, answer.message.tool_calls) == ('"no"', None)


async def test_call_of_a_response_fits_the_schema(client: Any) -> None:
    tool = {"type": "function", "name": NAME, "description": DESCRIPTION, "parameters": SUMS}
    response = await client.responses.create(
        model="demo",
        input=ASK[0]["content"],
        tools=[{**tool, "strict": True}],
        temperature=0,
        max_output_tokens=100,
    )
    call = response.output[-1]
    assert SUM.fullmatch(json.loads(call.arguments)["expression"])


async def test_call_of_a_message_fits_the_schema(served: Served) -> None:
    tool = {"name": NAME, "description": DESCRIPTION, "input_schema": SUMS, "strict": True}
    call: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 100, "tools": [tool]}
    async with connect(served) as client:
        message = await client.messages.create(**call, extra_body={"temperature": 0})
        assert message.stop_reason == "tool_use"
        assert SUM.fullmatch(message.content[-1].input["expression"])
        call["tools"] = [{**tool, "input_schema": {**SUMS, "not": {}}}]
        with pytest.raises(anthropic.BadRequestError, match="tools: cannot compile"):
            await client.messages.create(**call)


async def test_large_body_is_strict_too(client: Any) -> None:
    metadata = {str(index): "y" * 500 for index in range(16)}
    filler = {"chat_template_kwargs": {"x": "y" * 10_000}, "x" * 30_000: 1}
    answer = await ask(client, tools=tools(), metadata=metadata, extra_body=filler)
    assert SUM.fullmatch(expression(answer.choices[0].message.tool_calls[0]))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"tools": tools(parameters={**SUMS, "not": {}})},
            "tools: cannot compile this schema of strict tools",
        ),
        ({"tools": tools(), "extra_body": {"ignore_eos": True}}, "ignore_eos"),
    ],
)
async def test_strict_tools_are_refused_by_name(
    client: Any, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=problem):
        await ask(client, **fields)
