"""Structured outputs with the official `openai` client and the small bundled model."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, ConfigDict, Field

from tests.support.demo_served import serving_demo
from tests.support.openai_client import message_of
from tests.support.served_router import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: list[Any] = [{"role": "user", "content": "Who lives in the forest?"}]


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    colour: Literal["red", "brown", "grey"]
    legs: int = Field(ge=2, le=4)


SCHEMA = Animal.model_json_schema()
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_served() -> AsyncIterator[Served]:
    async with serving_demo() as served:
        yield served


@pytest.fixture
def served(module_served: Served) -> Served:
    return module_served


async def ask(client: Any, **fields: Any) -> Any:
    given = {"temperature": 1.3, "seed": 5, "max_completion_tokens": 120, **fields}
    return await client.chat.completions.create(model="demo", messages=ASK, **given)


def content(answer: Any) -> str:
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    return str(choice.message.content)


async def test_json_schema_is_followed(client: Any) -> None:
    for seed in range(5):
        answer = await ask(client, response_format=FORMAT, seed=seed)
        jsonschema.validate(json.loads(content(answer)), SCHEMA)


async def test_parse_returns_the_clients_own_class(client: Any) -> None:
    answer = await client.chat.completions.parse(
        model="demo", messages=ASK, response_format=Animal, seed=3, max_completion_tokens=120
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)


async def test_json_object_is_an_object(client: Any) -> None:
    forms = {"response_format": {"type": "json_object"}, "max_completion_tokens": 200}
    found = [await ask(client, seed=seed, temperature=0.7, **forms) for seed in range(4)]
    ended = [each.choices[0] for each in found if each.choices[0].finish_reason == "stop"]
    assert all(isinstance(json.loads(each.message.content), dict) for each in ended)
    assert all(each.choices[0].message.content.startswith("{") for each in found)


async def test_stream_gives_the_same_text_as_a_whole_answer(client: Any) -> None:
    whole = await ask(client, response_format=FORMAT)
    stream = await ask(client, response_format=FORMAT, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == content(whole)
    assert len([piece for piece in pieces if piece]) > 3


async def test_completions_and_choices_follow_the_form_too(client: Any) -> None:
    answer = await client.completions.create(
        model="demo", prompt="Once", n=3, max_tokens=120, extra_body={"response_format": FORMAT}
    )
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.text), SCHEMA)


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"choice": ["the fox", "the owl"]}}, "the fox|the owl"),
    ({"guided_choice": ["the fox", "the owl"]}, "the fox|the owl"),
    ({"structured_outputs": {"regex": "[a-c]{3}[0-9]"}}, "[a-c]{3}[0-9]"),
    ({"guided_regex": "[a-c]{3}[0-9]"}, "[a-c]{3}[0-9]"),
    ({"structured_outputs": {"json": {"enum": [1, 22]}}}, "1|22"),
    ({"structured_outputs": {"json": '{"enum": [1, 22]}'}}, "1|22"),
    ({"guided_json": {"const": "x"}}, '"x"'),
    ({"structured_outputs": {"grammar": 'start: "a" b\nb: "c" | "d"'}}, "a(c|d)"),
    ({"guided_grammar": 'root ::= "a" ("c" | "d")'}, "a(c|d)"),
]


@pytest.mark.parametrize(("field", "pattern"), FORMS)
async def test_extension_of_vllm_is_followed(
    client: Any, field: dict[str, Any], pattern: str
) -> None:
    assert re.fullmatch(pattern, content(await ask(client, extra_body=field)))


async def test_form_combines_with_stop_strings_penalties_and_logprobs(client: Any) -> None:
    answer = await ask(
        client,
        extra_body={"structured_outputs": {"regex": "[a-d]{30}"}, "repetition_penalty": 1.1},
        stop=["d"],
        logprobs=True,
        top_logprobs=2,
    )
    text = content(answer)
    assert re.fullmatch("[abc]*", text)
    assert answer.choices[0].logprobs.content


async def test_length_ends_an_answer_in_the_middle_of_its_form(client: Any) -> None:
    (choice,) = (await ask(client, response_format=FORMAT, max_completion_tokens=3)).choices
    assert choice.finish_reason == "length"
    assert choice.message.content.startswith("{")


REFUSED: list[tuple[object, str]] = [
    ({"type": "object", "properties": {"a": {"not": {}}}}, "/properties/a/not"),
    ({"type": "object", "properties": {"a": {"type": "text"}}}, "/properties/a/type"),
    ({"$ref": "#/nowhere"}, r"/\$ref"),
    (
        {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}$"} for i in range(20)]},
        "Unable to determine|too large|time",
    ),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED)
async def test_schema_that_cannot_be_followed_is_refused_by_its_place(
    client: Any, schema: object, words: str
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=words) as refusal:
        await ask(client, response_format=form)
    assert refusal.value.param == "response_format"
    assert "response_format" in message_of(refusal.value)
