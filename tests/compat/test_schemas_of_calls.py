"""`tool_choice`: arguments of forced calls are valid for their schema, with a real model.

The model's chat template is replaced by one that reads tools.
"""

import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio

from tests.compat.test_structured_outputs import ASK, SCHEMA, Animal
from tests.support import anthropic_client
from tests.support.demo_served import FOLDER, serving_demo
from tests.support.served_router import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{# <tool_call> #}"
)
SIZE: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"$ref": "#/$defs/size"}},
    "required": ["size"],
    "additionalProperties": False,
    "$defs": {"size": {"enum": ["small", "large"]}},
}
SCHEMAS: Mapping[str, Any] = {"find_animal": SCHEMA, "find_size": SIZE}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder: Path = tmp_path_factory.mktemp("calls") / "model"
    shutil.copytree(FOLDER, folder)
    settings = folder / "tokenizer_config.json"
    content = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps({**content, "chat_template": TEMPLATE}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    async with serving_demo(folder) as served:
        yield served


@pytest.fixture
def served(module_served: Served) -> Served:
    return module_served


def check(calls: Sequence[tuple[str, Any]]) -> None:
    assert calls
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    assert choice.finish_reason == "tool_calls"
    return [
        (each.function.name, json.loads(each.function.arguments))
        for each in choice.message.tool_calls
    ]


NAMED = {"type": "function", "function": {"name": "find_size"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_arguments_of_forced_calls_fit_the_schema(client: Any, choice: Any) -> None:
    call: dict[str, Any] = {"model": "demo", "messages": ASK, "tools": TOOLS, "temperature": 1.3}
    call |= {"tool_choice": choice, "max_completion_tokens": 300, "parallel_tool_calls": False}
    for seed in range(4):
        whole = await client.chat.completions.create(**call, seed=seed)
        found = calls_of(whole.choices[0])
        check(found)
        if choice == NAMED:
            assert [name for name, _ in found] == ["find_size"]
        async with client.chat.completions.stream(**call, seed=seed) as stream:
            final = await stream.get_final_completion()
        assert calls_of(final.choices[0]) == found


async def test_arguments_are_an_object_of_the_clients_class(client: Any) -> None:
    tool = openai.pydantic_function_tool(Animal, name="find_animal")
    answer = await client.chat.completions.parse(
        model="demo",
        messages=ASK,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "find_animal"}},
        max_completion_tokens=300,
        seed=3,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Animal)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS[:1]}},
        {"type": "custom", "custom": {"name": "find_animal"}},
        {"type": "function"},
        "any",
    ],
)
async def test_other_choices_of_tools_are_refused_by_name(client: Any, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice must be") as refusal:
        await client.chat.completions.create(
            model="demo", messages=ASK, tools=TOOLS, tool_choice=choice
        )
    assert refusal.value.param == "tool_choice"


async def test_inputs_of_strict_tools_fit_the_schema_through_anthropics_client(
    served: Served,
) -> None:
    tools = [
        {"name": name, "input_schema": schema, "strict": True} for name, schema in SCHEMAS.items()
    ]
    call: dict[str, Any] = {"model": "demo", "messages": ASK, "tools": tools, "max_tokens": 300}
    call["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    async with anthropic_client.connect(served) as client:
        whole = await client.messages.create(**call, extra_body={"temperature": 0})
        async with client.messages.stream(**call, extra_body={"temperature": 0}) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        check([(block.name, block.input) for block in message.content])
    assert [block.input for block in whole.content] == [block.input for block in streamed.content]
