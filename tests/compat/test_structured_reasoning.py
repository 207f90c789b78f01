"""Structured outputs of a model that reasons, with the clients of all HTTP APIs."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from tokenizers import AddedToken

from penstock.common.structured_outputs import AFTER_REASONING
from penstock.router.config import RouterConfig
from tests.support import anthropic_client
from tests.support.openai_client import HELLO, message_of, serving_with_client
from tests.support.served_router import Served
from tests.support.tokenizers import byte_level, write_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
TOKENIZER.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
TEMPLATE = (
    "{{ tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}[assistant]"
    "<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
NAMED = '{"name": "Ada"}'


class Model:
    """A served model, which writes a given text."""

    def __init__(self, served: Served, client: Any) -> None:
        self.served = served
        self.client = client

    def will_write(self, text: str) -> None:
        tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
        self.served.worker.answer = lambda prompt: tokens

    def form(self) -> tuple[str, str]:
        """Return kind and text of the constraint in the last request that the worker got."""
        form = self.served.worker.submits[-1].params.structured_outputs
        return form.kind, form.text


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    folder: Path = tmp_path_factory.mktemp("reasons") / "model"
    config = RouterConfig(write_folder(folder, TOKENIZER, TEMPLATE), "stub")
    async with serving_with_client(config) as (served, client):
        model = Model(served, client)
        model.will_write(f"It is Ada.\n</think>\n\n{NAMED}")
        yield model


def check_form(model: Model, kind: str) -> None:
    """Check that the constraint of the newest request begins after the reasoning."""
    outer, text = model.form()
    assert outer == AFTER_REASONING
    parts = json.loads(text)
    assert parts["kind"] == kind
    assert "</think>" in parts["grammar"]
    if kind == "json":
        assert json.loads(parts["text"]) == SCHEMA


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": FORMAT}, "json"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"extra_body": {"guided_json": SCHEMA}}, "json"),
        ({"extra_body": {"guided_regex": "[^x]*"}}, "regex"),
        ({"extra_body": {"structured_outputs": {"choice": [NAMED]}}}, "choice"),
        ({"extra_body": {"guided_grammar": 'start: "{" /.*/'}}, "grammar"),
    ],
)
async def test_content_of_a_chat_follows_its_reasoning(
    model: Model, fields: dict[str, Any], kind: str
) -> None:
    answer = await model.client.chat.completions.create(model="stub", messages=HELLO, **fields)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == (NAMED, "It is Ada.")
    check_form(model, kind)
    stream = await model.client.chat.completions.create(
        model="stub", messages=HELLO, stream=True, **fields
    )
    deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == NAMED


async def test_output_text_of_a_response_follows_its_reasoning(model: Model) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    response = await model.client.responses.create(model="stub", input="hi", text=text)
    assert response.output_text == NAMED
    assert [item.type for item in response.output] == ["reasoning", "message"]
    check_form(model, "json")


async def test_text_of_a_message_follows_its_thinking(model: Model) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    async with anthropic_client.connect(model.served) as client:
        message = await client.messages.create(
            model="stub", messages=HELLO, max_tokens=100, extra_body={"output_config": config}
        )
    assert [(block.type, getattr(block, "text", "")) for block in message.content] == [
        ("thinking", ""),
        ("text", NAMED),
    ]
    check_form(model, "json")


async def test_answer_without_reasoning_has_the_form_from_its_start(model: Model) -> None:
    model.will_write(NAMED)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    call = {"model": "stub", "messages": HELLO, "response_format": FORMAT}
    answer = await model.client.chat.completions.create(**call, extra_body=off)
    assert answer.choices[0].message.content == NAMED
    assert model.form() == ("json", json.dumps(SCHEMA))


async def test_forced_calls_and_completions_have_no_reasoning(model: Model) -> None:
    model.will_write('[{"name": "add", "parameters": {}}]')
    call = {"model": "stub", "messages": HELLO}
    tools = [{"type": "function", "function": {"name": "add"}}]
    answer = await model.client.chat.completions.create(**call, tools=tools, tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.name == "add"
    assert model.form()[0] == "json"
    await model.client.completions.create(
        model="stub", prompt="hi", extra_body={"guided_regex": "a"}
    )
    assert model.form() == ("regex", "a")


async def test_refusal_names_the_field_and_the_keyword(model: Model) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as refusal:
        await model.client.chat.completions.create(
            model="stub", messages=HELLO, response_format=form
        )
    assert refusal.value.param == "response_format"
    expected = "response_format: cannot compile this JSON Schema at /not: "
    assert message_of(refusal.value).startswith(expected)
