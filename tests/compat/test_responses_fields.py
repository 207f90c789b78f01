"""Each field of OpenAI's reference of responses is honored or refused by name.

The lists of fields and values come from the types of the official client, so that a test fails if a
new version has more fields or values.
"""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import openai
import pytest
import pytest_asyncio
from openai.types.responses import response_create_params as params
from openai.types.responses.response_includable import ResponseIncludable
from openai.types.responses.response_input_param import ResponseInputItemParam
from openai.types.responses.tool_param import ToolParam
from openai.types.shared_params.reasoning import Reasoning

from penstock.router.api.responses.body import ResponsesRequest
from penstock.router.api.responses.permitted import INCLUDABLE
from penstock.router.config import RouterConfig
from tests.support.openai_client import message_of, serving_with_client
from tests.support.responses_client import ADD, TOKENIZER, ResponsesModel, serving_responses
from tests.support.tokenizers import write_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
ACCEPTED: list[tuple[str, object]] = [
    ("access_programs", {}),
    ("background", False),
    ("context_management", []),
    ("conversation", None),
    ("image", {"context_compression": "auto"}),
    ("include", ["web_search_call.action.sources", "message.output_text.logprobs"]),
    ("input", "x"),
    ("input", [{"role": "user", "content": "x"}]),
    ("instructions", "x"),
    ("instructions", ""),
    ("instructions", None),
    ("max_output_tokens", 1),
    ("max_output_tokens", None),
    ("max_tool_calls", 1),
    ("metadata", {"a": "b"}),
    ("metadata", {}),
    ("model", None),
    ("moderation", None),
    ("parallel_tool_calls", False),
    ("previous_response_id", None),
    ("prompt", None),
    ("prompt_cache_key", "x"),
    ("prompt_cache_options", {"mode": "implicit"}),
    ("prompt_cache_retention", "24h"),
    ("reasoning", {"effort": "high"}),
    ("reasoning", {"summary": None, "context": "auto", "mode": "standard"}),
    ("reasoning", None),
    ("safety_identifier", "x"),
    ("service_tier", "default"),
    ("store", False),
    ("stream", False),
    ("stream_options", None),
    ("temperature", 0),
    ("temperature", None),
    ("text", {"format": {"type": "text"}, "verbosity": "medium"}),
    ("text", {"format": {"type": "json_object"}}),
    ("text", {"format": {**FORMAT, "strict": True, "description": "x"}}),
    ("tool_choice", "auto"),
    ("tools", []),
    ("tools", [ADD]),
    ("tools", [{"type": "function", "name": "f", "parameters": None, "strict": None}]),
    ("top_p", 1),
    ("truncation", "disabled"),
    ("user", "x"),
]
REFUSED: list[tuple[str, object]] = [
    ("access_programs", {"cyber": "standard"}),
    ("background", "yes"),
    ("context_management", [{"type": "compaction"}]),
    ("conversation", "conv_1"),
    ("image", {"context_compression": "enabled"}),
    ("include", ["reasoning.encrypted_content"]),
    ("include", ["x"]),
    ("input", None),
    ("input", ""),
    ("input", []),
    ("input", 5),
    ("input", [{"role": "robot", "content": "x"}]),
    ("input", [{"role": "user"}]),
    ("input", [{"content": "x"}]),
    ("input", [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]),
    ("input", [{"role": "user", "content": [{"type": "reasoning_text", "text": "x"}]}]),
    ("input", [{"type": "function_call", "name": "f", "arguments": "{}"}]),
    ("input", [{"type": "function_call", "call_id": "x", "arguments": "{}"}]),
    ("input", [{"type": "function_call_output", "call_id": "x"}]),
    ("input", [{"type": "function_call_output", "output": "x"}]),
    ("input", [{"type": "reasoning", "id": "x", "summary": [], "encrypted_content": "x"}]),
    ("instructions", 5),
    ("max_output_tokens", 0),
    ("max_output_tokens", 5000),
    ("max_output_tokens", 2.0),
    ("max_tool_calls", 0),
    ("metadata", {"a": 1}),
    ("metadata", {"a" * 65: "b"}),
    ("metadata", {"a": "b" * 513}),
    ("metadata", {str(index): "" for index in range(17)}),
    ("model", 7),
    ("moderation", {"model": "x"}),
    ("prompt", {"id": "x"}),
    ("prompt_cache_options", {"mode": "explicit"}),
    ("prompt_cache_retention", "1h"),
    ("reasoning", {"effort": "bogus"}),
    ("reasoning", {"summary": "auto"}),
    ("reasoning", {"generate_summary": "auto"}),
    ("reasoning", {"mode": "pro"}),
    ("reasoning", {"context": "all_turns"}),
    ("reasoning", {"x": 1}),
    ("service_tier", "flex"),
    ("stream", "true"),
    ("stream_options", {}),  # refused without `stream`
    ("temperature", 2.1),
    ("temperature", "1"),
    ("text", {"format": {"type": "x"}}),
    ("text", {"format": {"type": "json_schema", "name": "x"}}),
    ("text", {"format": {"type": "json_schema", "schema": {}}}),
    ("text", {"format": {**FORMAT, "x": 1}}),
    ("text", {"format": {**FORMAT, "schema": {"not": {}}}}),
    ("text", {"verbosity": "low"}),
    ("tool_choice", "required"),  # refused without `tools`
    ("tool_choice", {"type": "function", "name": "f"}),
    ("tool_choice", {"type": "web_search"}),
    ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}),
    ("tool_choice", {"type": "allowed_tools", "mode": "x", "tools": []}),
    ("tool_choice", 5),
    ("tools", [{"type": "function", "name": "no spaces"}]),
    ("tools", [{"type": "function", "name": "f", "parameters": 5}]),
    ("tools", [{"type": "function", "name": "f", "defer_loading": True}]),
    ("tools", [ADD, ADD]),
    ("tools", [{}]),
    ("top_logprobs", 2),  # refused without the logprobs in `include`
    ("top_p", 0),
    ("truncation", "always"),
]
OTHER = {"previous_response_id", "stream_options"}
"""Fields that other tests cover."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ResponsesModel]:
    async with serving_responses(tmp_path_factory.mktemp("fields")) as model:
        model.answer("x")
        yield model


async def create(model: ResponsesModel, /, **body: object) -> Any:
    extra = {"model": "stub", "input": "hello", **body}
    return await model.client.responses.create(extra_body=extra)


def fields_of_the_client() -> set[str]:
    return {
        *get_type_hints(params.ResponseCreateParamsBase),
        *get_type_hints(params.ResponseCreateParamsStreaming),
    }


def types_of(union: Any) -> set[str]:
    """Return the possible values of `type` of the members of a union of the client."""
    found: set[str] = set()
    for member in get_args(union):
        hint = get_type_hints(member).get("type")
        found |= _literals(hint)
    return found


def _literals(hint: Any) -> set[str]:
    if isinstance(hint, str):
        return {hint}
    return {name for one in get_args(hint) for name in _literals(one)}


async def test_every_field_of_the_client_is_in_the_tables() -> None:
    known = {name for name, _ in (*ACCEPTED, *REFUSED)} | OTHER
    assert fields_of_the_client() - known == set()
    accepted = {name for name, _ in ACCEPTED} | OTHER
    declared = set(ResponsesRequest.model_fields) & fields_of_the_client()
    assert declared - accepted == {"top_logprobs"}, "see test_responses"


async def test_every_value_of_include_is_known() -> None:
    assert set(get_args(ResponseIncludable)) == {*INCLUDABLE, "reasoning.encrypted_content"}


async def test_every_member_of_reasoning_is_in_the_tables() -> None:
    members = [value for name, value in (*ACCEPTED, *REFUSED) if name == "reasoning"]
    named = {name for value in members if isinstance(value, dict) for name in value}
    assert set(get_type_hints(Reasoning)) - named == set()


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
async def test_value_is_accepted(model: ResponsesModel, name: str, value: object) -> None:
    response = await create(model, **{name: value})
    assert response.status in ("completed", "incomplete")


@pytest.mark.parametrize(("name", "value"), REFUSED)
async def test_value_is_refused_by_name(model: ResponsesModel, name: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await create(model, **{name: value})
    assert refusal.value.param == name
    assert "\n" not in message_of(refusal.value)


@pytest.mark.parametrize("name", ["stop", "n", "x", "functions", "max_tokens"])
async def test_unknown_field_is_refused_by_name(model: ResponsesModel, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await create(model, **{name: 1})
    assert refusal.value.param == name
    assert name in message_of(refusal.value)


async def test_obfuscation_is_refused(model: ResponsesModel) -> None:
    options = {"include_obfuscation": True}
    with pytest.raises(openai.BadRequestError) as refusal:
        await create(model, stream=True, stream_options=options)
    assert refusal.value.param == "stream_options"


def refused_types(union: Any, ours: Sequence[str]) -> list[str]:
    return sorted(types_of(union) - set(ours))


@pytest.mark.parametrize("kind", refused_types(ToolParam, ("function",)))
async def test_tools_of_openai_are_refused_by_type(model: ResponsesModel, kind: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await create(model, tools=[ADD, {"type": kind}])
    assert refusal.value.param == "tools"
    assert message_of(refusal.value).startswith(f"tools.1: a tool of type {kind!r} is not")


OUR_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


@pytest.mark.parametrize("kind", refused_types(ResponseInputItemParam, OUR_ITEMS))
async def test_other_items_are_refused_by_type(model: ResponsesModel, kind: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await create(model, input=[{"role": "user", "content": "x"}, {"type": kind, "id": "x"}])
    assert refusal.value.param == "input"
    assert message_of(refusal.value).startswith(f"input.1: an item of type {kind!r} is not")


async def test_types_of_tools_and_items_are_found() -> None:
    assert len(types_of(ToolParam)) > 8
    assert set(OUR_ITEMS) <= types_of(ResponseInputItemParam)


@pytest.mark.parametrize(
    "query", [{"stream": "true"}, {"starting_after": "1"}, {"include": "x"}, {"x": "y"}]
)
async def test_parameters_of_retrieval_are_refused_by_name(
    model: ResponsesModel, query: dict[str, str]
) -> None:
    response = await create(model)
    with pytest.raises(openai.BadRequestError) as refusal:
        await model.client.responses.with_raw_response.retrieve(response.id, extra_query=query)
    assert [refusal.value.param] == list(query)


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "101"}, {"order": "x"}, {"after": "x"}, {"before": "x"}]
)
async def test_parameters_of_the_list_are_refused_by_name(
    model: ResponsesModel, query: dict[str, str]
) -> None:
    response = await create(model)
    with pytest.raises(openai.BadRequestError) as refusal:
        await model.client.responses.input_items.list(response.id, extra_query=query)
    assert [refusal.value.param] == list(query)
    if "limit" in query:
        assert f"'limit' is {query['limit']!r}" in message_of(refusal.value)


async def test_refusal_names_the_given_limit_of_calls(model: ResponsesModel) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tool_calls is -3"):
        await model("x", max_tool_calls=-3)


@pytest.mark.parametrize(
    ("mode", "name"), [("auto", "text"), ("required", "tools"), (None, "text")]
)
async def test_invalid_schema_is_refused_by_the_name_of_its_field(
    model: ResponsesModel, mode: str | None, name: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=a)b"}}}
    body: dict[str, Any] = {"tools": [ADD]}
    if mode is not None:
        some = [{"type": "function", "name": "add"}]
        body["tool_choice"] = {"type": "allowed_tools", "mode": mode, "tools": some}
    if mode == "required":
        body["tools"] = [{"type": "function", "name": "add", "parameters": schema}]
    else:
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refusal:
        await create(model, **body)
    assert refusal.value.param == name


async def test_refusal_of_a_form_with_a_forced_call_names_the_form(model: ResponsesModel) -> None:
    with pytest.raises(openai.BadRequestError, match=r"such as text\.format: leave out"):
        await create(
            model, tools=[ADD], tool_choice="required", text={"format": {"type": "json_object"}}
        )


async def test_messages_is_renamed_only_where_it_is_a_field(
    model: ResponsesModel,
) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{"}
    with pytest.raises(openai.BadRequestError, match="check the messages' roles") as refusal:
        await create(model, input=[call])
    assert refusal.value.param == "input"
    with pytest.raises(openai.BadRequestError, match="input has 4097 messages; at most"):
        await create(model, input=[{"role": "user", "content": "x"}] * 4097)


async def test_effort_is_refused_if_the_template_does_not_read_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", TOKENIZER, "{{ messages }}")
    async with serving_with_client(RouterConfig(folder, "stub")) as (_, client):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.responses.create(model="stub", input="x", reasoning={"effort": "low"})
    assert refusal.value.param == "reasoning"


async def test_tools_are_refused_if_the_form_of_calls_is_unknown(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", TOKENIZER, "{{ tools }}{{ messages }}")
    async with serving_with_client(RouterConfig(folder, "stub")) as (_, client):
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as refusal:
            await client.responses.create(model="stub", input="x", tools=[ADD])
    assert refusal.value.param == "tools"
