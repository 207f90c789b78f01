"""Structured outputs: structural tags, the client's helpers, and conflicting fields."""

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.compat.test_structured_outputs import ASK, FORMAT, SCHEMA, Animal, ask, content
from tests.compat.test_structured_outputs import module_served as module_served  # a fixture
from tests.compat.test_structured_outputs import served as served  # a fixture

pytestmark = pytest.mark.asyncio(loop_scope="module")

STORY = [{"role": "user", "content": "Tell a short story about a fox named Ada in a forest."}]
TAG: dict[str, Any] = {
    "structures": [{"begin": " a", "schema": {"const": "X"}, "end": "!"}],
    "triggers": [" a"],
}
"""A structural tag: the text `"X"!` must follow each " a"."""


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "structural_tag", **TAG}},
        {"extra_body": {"structured_outputs": {"structural_tag": json.dumps(TAG)}}},
    ],
    ids=["response_format", "structured_outputs"],
)
async def test_schema_of_a_structural_tag_follows_its_trigger(
    client: Any, field: dict[str, Any]
) -> None:
    call = {"model": "demo", "messages": STORY, "temperature": 0, "max_completion_tokens": 60}
    answer = await client.chat.completions.create(**call, **field)
    free, *tagged = answer.choices[0].message.content.split(" a")
    assert free
    assert tagged
    assert all(text.startswith('"X"!'[: len(text)]) for text in tagged)


async def test_streamed_answer_is_an_object_of_the_clients_class(client: Any) -> None:
    async with client.chat.completions.stream(
        model="demo", messages=ASK, response_format=Animal, seed=3, max_completion_tokens=120
    ) as stream:
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Animal)


@pytest.mark.parametrize("strict", [True, False, None])
async def test_schema_is_followed_whatever_strict_says(client: Any, strict: bool | None) -> None:
    form = {"type": "json_schema", "json_schema": {**FORMAT["json_schema"], "strict": strict}}  # type: ignore[dict-item]
    jsonschema.validate(json.loads(content(await ask(client, response_format=form))), SCHEMA)


async def test_every_choice_of_a_chat_follows_the_form(client: Any) -> None:
    fields = {"response_format": FORMAT, "n": 3, "extra_body": {"min_tokens": 10}}
    answer = await ask(client, **fields)
    texts = [choice.message.content for choice in answer.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    again = await ask(client, **fields)
    assert [choice.message.content for choice in again.choices] == texts


JSON_OBJECT = {"type": "json_object"}
BOMB = {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i % 40}}}b"} for i in range(1200)]}
"""A schema whose check would take minutes."""

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"response_format": JSON_OBJECT, "guided_regex": "a"},
        "guided_regex",
        "response_format and guided_regex both set the form",
    ),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs",
        "structured_outputs must have exactly one of",
    ),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "structured_outputs.xml"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs", "regex must be a string"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "structured_outputs"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "guided_regex"),
    ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
    ({"guided_choice": []}, "guided_choice", "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice", "guided_choice"),
    ({"guided_json": 5}, "guided_json", "guided_json"),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema must be"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "response_format",
        "json_schema.strict must be true or false",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": BOMB}}},
        "response_format",
        # The schema exceeds both limits; the machine determines which limit is exceeded first.
        r"needs more than (1 s of processor time|256 MiB of memory)",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "structures"),
    (
        {"response_format": JSON_OBJECT, "use_beam_search": True, "n": 2},
        "use_beam_search",
        "use_beam",
    ),
    ({"response_format": JSON_OBJECT, "ignore_eos": True}, "ignore_eos", "ignore_eos"),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED)
async def test_form_is_refused_by_the_name_of_its_field(
    client: Any, body: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refusal:
        await client.chat.completions.create(model="demo", messages=ASK, extra_body=body)
    assert refusal.value.param == param
