"""Tool calls and reasoning in chats through OpenAI's client, whole and streamed."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer

from penstock.protos.worker_codec import unpack_tokens
from penstock.router.config import RouterConfig
from tests.support.openai_client import HELLO, serving_with_client
from tests.support.served_router import Served
from tests.support.tokenizers import byte_level, write_folder
from tests.support.tool_chats import ADD

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "[assistant]{% if open %}<think>\n{% endif %}"
)
SUM = '{"a": 17, "b": 25}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {SUM}}}\n</tool_call>'
THOUGHT = "<think>\nwhy 😀\n</think>\n\n"
FULL = f"{THOUGHT}I add.\n{CALL}\n{CALL}"
TOOLS: dict[str, Any] = {"tools": [ADD]}


class Model:
    """A served model that answers with a given text."""

    def __init__(self, served: Served, client: Any, tokenizer: Tokenizer = TOKENIZER) -> None:
        self.served = served
        self.client = client
        self.tokenizer = tokenizer

    async def __call__(self, text: str, stream: bool = False, **body: Any) -> Any:
        """Return the choices; for a stream, assemble them from the official client's chunks."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        self.served.worker.answer = lambda prompt: tokens
        create = self.client.chat.completions.create
        headers = {"x-request-id": "me"}
        call = {"model": "stub", "messages": HELLO, "extra_headers": headers, **body}
        if not stream:
            return (await create(**call)).choices
        choices: dict[int, Any] = {}
        async for chunk in await create(stream=True, **call):
            for choice in chunk.choices:
                add_chunk(choices.setdefault(choice.index, {"calls": []}), choice)
        return [whole(choices[index]) for index in sorted(choices)]


def add_chunk(known: dict[str, Any], choice: Any) -> None:
    """Add a chunk's delta; check OpenAI's order: id and name first, then the arguments."""
    assert "finish" not in known
    delta = choice.delta
    for field in ("content", "reasoning_content"):
        known[field] = known.get(field, "") + (getattr(delta, field, None) or "")
    for call in delta.tool_calls or ():
        if call.index == len(known["calls"]):
            assert call.type == "function"
            assert call.function.arguments == ""
            known["calls"].append([call.id, call.function.name, ""])
        else:
            assert call.index == len(known["calls"]) - 1
            assert (call.id, call.type, call.function.name) == (None, None, None)
            known["calls"][-1][2] += call.function.arguments
    if choice.finish_reason:
        known["finish"] = choice.finish_reason


def whole(known: dict[str, Any]) -> Any:
    """Return a streamed choice in the form of a choice that is not streamed."""
    message: dict[str, Any] = {"content": known["content"] or None}
    if known["reasoning_content"]:
        message["reasoning_content"] = known["reasoning_content"]
    if known["calls"]:
        message["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": function, "arguments": text}}
            for name, function, text in known["calls"]
        ]
    choice = {"finish_reason": known["finish"], "index": 0, "message": message}
    return openai.types.chat.chat_completion.Choice.construct(**choice)


def found(choice: Any) -> tuple[Any, ...]:
    message = choice.message
    calls = [(each.function.name, each.function.arguments) for each in message.tool_calls or ()]
    reasoning = getattr(message, "reasoning_content", None)
    return message.content, reasoning, calls, choice.finish_reason


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    folder: Path = tmp_path_factory.mktemp("calls") / "model"
    config = RouterConfig(write_folder(folder, TOKENIZER, TEMPLATE), "stub")
    async with serving_with_client(config) as (served, client):
        yield Model(served, client)


ONE = [("add", SUM)]
both = pytest.mark.parametrize("stream", [False, True])


@both
async def test_calls_reasoning_and_content_are_told_apart(model: Model, stream: bool) -> None:
    (choice,) = await model(FULL, stream, **TOOLS)
    assert found(choice) == ("I add.", "why 😀", ONE * 2, "tool_calls")


@both
async def test_content_is_none_if_there_are_only_calls(model: Model, stream: bool) -> None:
    (choice,) = await model(CALL, stream, **TOOLS)
    assert found(choice) == (None, None, ONE, "tool_calls")


@both
async def test_answer_without_calls_is_content(model: Model, stream: bool) -> None:
    (choice,) = await model("42 < 43", stream, **TOOLS)
    assert found(choice) == ("42 < 43", None, [], "stop")


@both
async def test_parallel_tool_calls_false_keeps_the_first_call(model: Model, stream: bool) -> None:
    (choice,) = await model(FULL, stream, **TOOLS, parallel_tool_calls=False)
    assert found(choice) == ("I add.", "why 😀", ONE, "tool_calls")


@both
@pytest.mark.parametrize("body", [{}, {**TOOLS, "tool_choice": "none"}])
async def test_calls_are_content_if_no_tool_may_be_called(
    model: Model, stream: bool, body: dict[str, Any]
) -> None:
    (choice,) = await model(CALL, stream, **body)
    assert found(choice) == (CALL, None, [], "stop")


@both
async def test_structured_answer_is_content_even_if_it_looks_like_a_call(
    tmp_path: Path, stream: bool
) -> None:
    folder = write_folder(tmp_path / "model", TOKENIZER, TEMPLATE)
    config = RouterConfig(folder, "stub", tool_call_parser="llama3_json")
    text = '{"name": "add", "parameters": {"a": 1}}'
    schema = {"type": "object", "properties": {"name": {}, "parameters": {}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tag = {"begin": "<x>", "end": "</x>", "schema": {}}
    free = {"type": "structural_tag", "structures": [tag], "triggers": ["<x>"]}
    calls = [("add", '{"a": 1}')]
    async with serving_with_client(config) as (served, client):
        model = Model(served, client)
        (choice,) = await model(text, stream, **TOOLS, response_format=form)
        assert found(choice) == (text, None, [], "stop")
        (choice,) = await model(text, stream, **TOOLS, extra_body={"guided_choice": [text]})
        assert found(choice) == (text, None, [], "stop")
        (choice,) = await model(text, stream, **TOOLS, response_format=free)
        assert found(choice) == (None, None, calls, "tool_calls")


@both
async def test_call_that_is_cut_has_finish_reason_length(model: Model, stream: bool) -> None:
    tokens = len(TOKENIZER.encode(CALL, add_special_tokens=False).ids)
    (choice,) = await model(CALL, stream, **TOOLS, max_tokens=tokens - 20)
    content, reasoning, ((name, arguments),), finish = found(choice)
    assert (content, reasoning, name, finish) == (None, None, "add", "length")
    assert SUM.startswith(arguments)


@both
async def test_stop_string_ends_the_answer_before_the_call(model: Model, stream: bool) -> None:
    (choice,) = await model(FULL, stream, **TOOLS, stop=["<tool_call>"])
    assert found(choice) == ("I add.\n", "why 😀", [], "stop")


@both
async def test_every_choice_has_its_own_calls(model: Model, stream: bool) -> None:
    choices = await model(f"x{CALL}", stream, **TOOLS, n=2)
    # Choice c of the stub omits its first c tokens, so the second choice has no "x".
    assert [found(choice)[0] for choice in choices] == ["x", None]
    ids = [choice.message.tool_calls[0].id for choice in choices]
    assert len(set(ids)) == 2


async def test_ids_of_calls_depend_only_on_request_prompt_and_index(model: Model) -> None:
    ids = []
    for stream in (False, True):
        (choice,) = await model(FULL, stream, **TOOLS)
        ids.append([call.id for call in choice.message.tool_calls])
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2
    assert all(each.startswith("call_") for each in ids[0])
    longer = [*HELLO, *HELLO]
    (choice,) = await model(FULL, **TOOLS, messages=longer)
    assert not {call.id for call in choice.message.tool_calls} & set(ids[0])


@both
async def test_prompt_can_begin_the_reasoning(model: Model, stream: bool) -> None:
    body = {"extra_body": {"chat_template_kwargs": {"open": True}}}
    (choice,) = await model("why\n</think>\n\nx", stream, **body)
    assert found(choice) == ("x", "why", [], "stop")


@both
async def test_include_reasoning_false_leaves_out_the_reasoning(model: Model, stream: bool) -> None:
    (choice,) = await model(f"{THOUGHT}x", stream, extra_body={"include_reasoning": False})
    assert found(choice) == ("x", None, [], "stop")


async def test_logprobs_and_token_ids_cover_all_tokens(model: Model) -> None:
    tokens = TOKENIZER.encode(FULL, add_special_tokens=False).ids
    body = {**TOOLS, "logprobs": True, "extra_body": {"return_token_ids": True}}
    (choice,) = await model(FULL, **body)
    assert choice.token_ids[:-1] == tokens
    entries: list[Any] = []
    ids: list[int] = []
    stream = await model.client.chat.completions.create(
        model="stub", messages=HELLO, stream=True, **body
    )
    async for chunk in stream:
        for each in chunk.choices:
            entries += each.logprobs.content if each.logprobs else []
            ids += getattr(each, "token_ids", None) or []
    assert ids == choice.token_ids
    assert [each.token for each in entries] == [each.token for each in choice.logprobs.content]


async def test_usage_counts_all_tokens_of_a_stream(model: Model) -> None:
    whole = await model.client.chat.completions.create(model="stub", messages=HELLO, **TOOLS)
    for options in ({}, {"continuous_usage_stats": True}):
        stream = await model.client.chat.completions.create(
            model="stub",
            messages=HELLO,
            stream=True,
            stream_options={"include_usage": True, **options},
            **TOOLS,
        )
        *_, last = [chunk async for chunk in stream]
        assert last.usage.completion_tokens == whole.usage.completion_tokens


async def test_the_clients_own_accumulator_reads_the_stream(model: Model) -> None:
    tokens = TOKENIZER.encode(FULL, add_special_tokens=False).ids
    model.served.worker.answer = lambda prompt: tokens
    async with model.client.chat.completions.stream(
        model="stub", messages=HELLO, **TOOLS
    ) as stream:
        events = [event.type async for event in stream]
        final = await stream.get_final_completion()
    (choice,) = final.choices
    assert found(choice)[0] == "I add."
    assert found(choice)[2:] == (ONE * 2, "tool_calls")
    assert events.count("tool_calls.function.arguments.done") == 2


async def test_conversation_goes_on_with_the_calls_result(model: Model) -> None:
    (choice,) = await model(CALL, **TOOLS)
    (call,) = choice.message.tool_calls
    result = json.loads(call.function.arguments)
    answer = {"role": "tool", "tool_call_id": call.id, "content": str(sum(result.values()))}
    (choice,) = await model("It is 42.", **TOOLS, messages=[*HELLO, choice.message, answer])
    assert choice.message.content == "It is 42."
    assert "[tool]42" in TOKENIZER.decode(unpack_tokens(model.served.worker.submits[-1].prompt))


async def test_tools_are_refused_if_the_form_of_calls_is_unknown(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", TOKENIZER, "{{ tools }}{{ messages }}")
    async with serving_with_client(RouterConfig(folder, "stub")) as (_, client):
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as refusal:
            await client.chat.completions.create(model="stub", messages=HELLO, **TOOLS)
    assert refusal.value.param == "tools"


@both
async def test_special_tokens_of_the_format_are_read_and_not_shown(
    tmp_path: Path, stream: bool
) -> None:
    tokenizer = byte_level()
    markers = ["[TOOL_CALLS]", "[ARGS]", "[OTHER]"]
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in markers])
    template = "{{ tools }}[TOOL_CALLS]{{ messages }}"
    folder = write_folder(tmp_path / "model", tokenizer, template)
    async with serving_with_client(RouterConfig(folder, "stub")) as (served, client):
        model = Model(served, client, tokenizer)
        text = f"I[OTHER] add.[TOOL_CALLS]add[ARGS]{SUM}"
        (choice,) = await model(text, stream, **TOOLS)
        assert found(choice) == ("I add.", None, ONE, "tool_calls")
        (call,) = choice.message.tool_calls
        assert len(call.id) == 9  # Mistral's templates accept only ids of 9 characters
        assert call.id.isalnum()
        (choice,) = await model(text, stream)
        assert found(choice) == (f"I add.add{SUM}", None, [], "stop")


@both
async def test_surrogate_in_a_call_is_replaced(tmp_path: Path, stream: bool) -> None:
    folder = write_folder(tmp_path / "model", TOKENIZER, TEMPLATE)
    config = RouterConfig(folder, "stub", tool_call_parser="pythonic")
    async with serving_with_client(config) as (served, client):
        model = Model(served, client)
        (choice,) = await model(r"[say(a='\ud83d\ude00', b='\ud83d')]", stream, **TOOLS)
        calls = [("say", '{"a": "😀", "b": "\ufffd"}')]
        assert found(choice) == (None, None, calls, "tool_calls")


@both
async def test_start_tag_of_a_token_and_text_is_read(tmp_path: Path, stream: bool) -> None:
    tokenizer = byte_level()
    markers = ["<|channel>", "<channel|>"]
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in markers])
    folder = write_folder(tmp_path / "model", tokenizer, "{{ messages }}{# <|channel>thought #}")
    async with serving_with_client(RouterConfig(folder, "stub")) as (served, client):
        model = Model(served, client, tokenizer)
        (choice,) = await model("<|channel>thought\nwhy\n<channel|>It is 42.", stream)
        assert found(choice) == ("It is 42.", "why", [], "stop")


async def test_unknown_parsers_are_refused_with_the_list(tmp_path: Path) -> None:
    for field in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(
            ValueError, match="unknown parser 'gpt9': expected one of auto, none, deepseek"
        ):
            replace(RouterConfig(tmp_path, "stub"), **{field: "gpt9"})  # type: ignore[arg-type]


async def test_parsers_can_be_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", TOKENIZER, TEMPLATE)
    config = RouterConfig(folder, "stub", tool_call_parser="pythonic", reasoning_parser="none")
    async with serving_with_client(config) as (served, client):
        model = Model(served, client)
        (choice,) = await model("[add(a=17, b=25)]", True, **TOOLS)
        assert found(choice) == (None, None, ONE, "tool_calls")
        (choice,) = await model(THOUGHT)
        assert found(choice) == (THOUGHT, None, [], "stop")
