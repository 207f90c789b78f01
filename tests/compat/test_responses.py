"""Responses through OpenAI's client, whole and streamed: text, reasoning, tools and schemas."""

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response
from pydantic import BaseModel, ConfigDict

from penstock.protos.worker_codec import num_prompt_tokens
from tests.support.openai_client import message_of
from tests.support.responses_client import (
    ADD,
    CALL,
    FULL,
    SUM,
    THOUGHT,
    ResponsesModel,
    serving_responses,
    tokens_of,
    without_ids,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS: dict[str, Any] = {"tools": [ADD]}
both = pytest.mark.parametrize("stream", [False, True])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ResponsesModel]:
    async with serving_responses(tmp_path_factory.mktemp("responses")) as model:
        yield model


def found(response: Any) -> list[tuple[str, ...]]:
    """Return the output items of a response, without their ids."""
    shown: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            shown.append(("call", item.name, item.arguments))
        else:
            (content,) = item.content
            shown.append((item.type, content.text))
    return shown


@both
async def test_text_input_gives_a_message(model: ResponsesModel, stream: bool) -> None:
    response = await model("It is 42.", stream)
    assert (response.status, response.output_text) == ("completed", "It is 42.")
    assert found(response) == [("message", "It is 42.")]
    assert model.prompt() == "[user]hello[assistant]"
    assert response.usage.input_tokens == num_prompt_tokens(model.served.worker.submits[-1])
    assert response.usage.output_tokens == len(tokens_of("It is 42.")) + 1  # + 1 for the end token
    assert response.usage.output_tokens_details.reasoning_tokens == 0


@both
async def test_reasoning_content_and_calls_are_items(model: ResponsesModel, stream: bool) -> None:
    response = await model(FULL, stream, **TOOLS)
    call = ("call", "add", SUM)
    assert found(response) == [("reasoning", "why 😀"), ("message", "I add."), call, call]
    assert [item.status for item in response.output] == ["completed"] * 4
    assert len({item.id for item in response.output}) == 4
    ids = {item.call_id for item in response.output if item.type == "function_call"}
    assert len(ids) == 2


async def test_stream_ends_with_the_same_response_as_a_whole_call(model: ResponsesModel) -> None:
    for text in (FULL, "x", CALL, THOUGHT, ""):
        whole = await model(text, **TOOLS, instructions="be brief")
        streamed = await model(text, True, **TOOLS, instructions="be brief")
        assert without_ids(whole.to_dict()) == without_ids(streamed.to_dict())


async def test_response_has_the_form_of_the_clients_types(model: ResponsesModel) -> None:
    raw = await model.client.responses.with_raw_response.create(model="stub", input="x", **TOOLS)
    Response.model_validate_json(raw.content)


@both
@pytest.mark.parametrize("text", [FULL, f"{THOUGHT}x", "x", CALL])
async def test_reasoning_tokens_are_those_before_the_content(
    model: ResponsesModel, stream: bool, text: str
) -> None:
    usage = (await model(text, stream, **TOOLS)).usage
    expected = len(tokens_of(THOUGHT)) if text.startswith(THOUGHT) else 0
    assert usage.output_tokens_details.reasoning_tokens == expected
    assert usage.output_tokens == len(tokens_of(text)) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


@both
async def test_answer_without_text_is_an_empty_message(model: ResponsesModel, stream: bool) -> None:
    response = await model("", stream)
    assert found(response) == [("message", "")]


@both
async def test_limited_answer_is_incomplete(model: ResponsesModel, stream: bool) -> None:
    response = await model("It is 42.", stream, max_output_tokens=4)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"
    assert response.output_text == "It is "
    assert (response.max_output_tokens, response.usage.output_tokens) == (4, 4)


@both
async def test_conversation_goes_on_with_the_result_of_a_call(
    model: ResponsesModel, stream: bool
) -> None:
    response = await model(f"{THOUGHT}{CALL}", stream, **TOOLS)
    call = response.output[-1]
    total = str(sum(json.loads(call.arguments).values()))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": total}
    question = {"role": "user", "content": "sum?"}
    items = [question, *response.output, output]
    answer = await model("It is 42.", stream, input=items, instructions="add", **TOOLS)
    assert answer.output_text == "It is 42."
    shown = f"<think>why 😀</think>({call.call_id} add a=17 b=25)"
    assert model.prompt().endswith(
        f"<tool_call>[system]add[user]sum?[assistant]{shown}[tool]42[assistant]"
    )


async def test_every_kind_of_message_reaches_the_template(model: ResponsesModel) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 2},
        {"type": "message", "role": "assistant", "content": "b", "phase": "final_answer"},
        {"type": "message", "role": "user", "content": "c"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "e", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "g"}],
        },
    ]
    await model("x", input=items)
    assert model.prompt() == (
        "[developer]d[user]a\na[assistant]b[user]c[assistant]<think>s</think>e(c1 f)[tool]g"
        "[assistant]"
    )


@both
async def test_tool_choice_none_hides_the_tools(model: ResponsesModel, stream: bool) -> None:
    response = await model(CALL, stream, **TOOLS, tool_choice="none")
    assert found(response) == [("message", CALL)]
    assert model.prompt() == "[user]hello[assistant]"
    assert response.tool_choice == "none"


@both
async def test_required_call_is_forced_by_a_schema(model: ResponsesModel, stream: bool) -> None:
    text = f'[{{"name": "add", "parameters": {SUM}}}]'
    response = await model(text, stream, **TOOLS, tool_choice="required")
    assert found(response) == [("call", "add", SUM)]
    forced = model.served.worker.submits[-1].params.structured_outputs
    assert '"minItems":1' in forced.text


@both
async def test_named_call_is_forced_by_its_parameters(model: ResponsesModel, stream: bool) -> None:
    choice = {"type": "function", "name": "add"}
    response = await model(SUM, stream, **TOOLS, tool_choice=choice)
    assert found(response) == [("call", "add", SUM)]
    assert response.tool_choice.name == "add"


@both
async def test_allowed_tools_hide_the_others(model: ResponsesModel, stream: bool) -> None:
    tools = [ADD, {**ADD, "name": "subtract"}]
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "add"}],
    }
    response = await model(CALL, stream, tools=tools, tool_choice=choice)
    assert found(response) == [("call", "add", SUM)]
    assert "subtract" not in model.prompt()
    assert [tool.name for tool in response.tools] == ["add", "subtract"]


async def test_allowed_tools_can_force_a_call_of_one_of_them(model: ResponsesModel) -> None:
    tools = [ADD, {**ADD, "name": "subtract"}]
    allowed = [{"type": "function", "name": "subtract"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    text = f'[{{"name": "subtract", "parameters": {SUM}}}]'
    response = await model(text, tools=tools, tool_choice=choice)
    assert found(response) == [("call", "subtract", SUM)]
    forced = model.served.worker.submits[-1].params.structured_outputs
    assert "subtract" in forced.text
    assert '"add"' not in forced.text


@both
async def test_parallel_tool_calls_false_keeps_one_call(
    model: ResponsesModel, stream: bool
) -> None:
    response = await model(FULL, stream, **TOOLS, parallel_tool_calls=False)
    assert [one[0] for one in found(response)] == ["reasoning", "message", "call"]
    assert response.parallel_tool_calls is False


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    colour: Literal["red", "brown"]


async def test_structured_answer_is_parsed_by_the_client(model: ResponsesModel) -> None:
    model.answer('{"name": "fox", "colour": "red"}')
    response = await model.client.responses.parse(model="stub", input="who?", text_format=Animal)
    assert response.output_parsed == Animal(name="fox", colour="red")
    sent = model.served.worker.submits[-1].params.structured_outputs
    assert "colour" in str(sent)


async def test_structured_stream_is_parsed_by_the_client(model: ResponsesModel) -> None:
    model.answer('{"name": "fox", "colour": "red"}')
    async with model.client.responses.stream(
        model="stub", input="who?", text_format=Animal
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_parsed == Animal(name="fox", colour="red")
    assert kinds[-1] == "response.completed"


async def test_the_clients_own_accumulator_reads_the_stream(model: ResponsesModel) -> None:
    model.answer(FULL)
    async with model.client.responses.stream(model="stub", input="x", **TOOLS) as stream:
        done = [event async for event in stream if event.type.endswith("arguments.done")]
        final = await stream.get_final_response()
    assert [event.arguments for event in done] == [SUM, SUM]
    assert final.output_text == "I add."
    assert final.output[-1].parsed_arguments == json.loads(SUM)


@both
async def test_logprobs_are_those_of_the_texts_tokens(model: ResponsesModel, stream: bool) -> None:
    text = "It is 😀."
    response = await model(
        f"{THOUGHT}{text}\n{CALL}",
        stream,
        **TOOLS,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    (content,) = response.output[1].content
    entries = content.logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == text
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert response.top_logprobs == 2


@both
@pytest.mark.parametrize("text", ["a <tool", "a <", "a 😀", "\n\n"])
async def test_text_held_back_until_the_end_has_its_logprobs(
    model: ResponsesModel, stream: bool, text: str
) -> None:
    include = ["message.output_text.logprobs"]
    response = await model(text, stream, **TOOLS, include=include)
    (content,) = response.output[0].content
    joined = b"".join(bytes(entry.bytes) for entry in content.logprobs).decode()
    assert joined == content.text == text


@both
async def test_parameters_reach_the_worker(model: ResponsesModel, stream: bool) -> None:
    body = {"temperature": 0.5, "top_p": 0.25, "max_output_tokens": 7}
    extra = {"top_k": 3, "seed": 5, "min_p": 0.125, "presence_penalty": 0.5}
    response = await model("x", stream, **body, extra_body=extra)
    params = model.served.worker.submits[-1].params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 7)
    assert (params.top_k, params.min_p, params.presence_penalty) == (3, 0.125, 0.5)
    assert (response.temperature, response.top_p) == (0.5, 0.25)


async def test_reasoning_effort_reaches_the_template(model: ResponsesModel) -> None:
    response = await model("x", reasoning={"effort": "low"})
    assert model.prompt() == "[user]hello[assistant]low"
    assert response.reasoning.effort == "low"


async def test_response_repeats_the_fields_of_the_body(model: ResponsesModel) -> None:
    given = {
        "instructions": "be brief",
        "metadata": {"a": "b"},
        "user": "me",
        "safety_identifier": "id",
        "prompt_cache_key": "key",
        "max_tool_calls": 3,
        "truncation": "disabled",
        "text": {"format": {"type": "json_object"}},
        **TOOLS,
    }
    shown = (await model("{}", **given, service_tier="auto")).to_dict()
    assert {name: shown[name] for name in given if name != "text"} == {
        name: value for name, value in given.items() if name != "text"
    }
    assert shown["text"]["format"] == {"type": "json_object"}
    assert shown["service_tier"] == "default"
    assert shown["object"] == "response"
    assert shown["model"] == "stub"


async def test_cached_tokens_are_counted(model: ResponsesModel) -> None:
    response = await model("x")
    assert response.usage.input_tokens_details.cached_tokens == 0


async def test_errors_have_openais_form(model: ResponsesModel) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await model("x", input=[{"role": "user", "content": [{"type": "input_image"}]}])
    assert refusal.value.param == "input"
    assert message_of(refusal.value).startswith("input.0: content parts of type 'input_image'")
    with pytest.raises(openai.NotFoundError):
        await model("x", model="other")
    with pytest.raises(openai.BadRequestError) as refusal:
        await model("x", input="y" * 9000)
    assert refusal.value.code == "context_length_exceeded"
    assert refusal.value.param == "input"
