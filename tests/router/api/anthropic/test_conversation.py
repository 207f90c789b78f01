"""Messages of Anthropic's API become the conversation that chat templates read."""

import json
from typing import Any

import pytest

from penstock.common.text.chat_source import TemplateOptions
from penstock.router.api.anthropic.schema import MessagesBody
from penstock.router.api.generation.parsed_body import (
    ParsedBody,
    job_items,
    parse_body,
    parse_job,
    read_parsed,
)
from penstock.router.config import RequestBounds
from penstock.router.errors import ServingError
from penstock.router.requests.request import ModelLimits
from tests.support.anthropic_client import ADD

MODEL = ModelLimits("stub", 2048, 1024)
BOUNDS = RequestBounds()
CALLS = [
    {"type": "tool_use", "id": str(number), "name": name, "input": {"a": number}}
    for number, name in enumerate(["add", "look_up"])
]
PLAIN_CALLS = [
    {
        "id": each["id"],
        "type": "function",
        "function": {
            "name": each["name"],
            "arguments": json.dumps(each["input"], separators=(",", ":")),
        },
    }
    for each in CALLS
]


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def result(call: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, **fields}


def parsed(**fields: Any) -> ParsedBody[Any]:
    body = {"model": "stub", "max_tokens": 5, **fields}
    return parse_body("messages", json.dumps(body).encode(), BOUNDS, MODEL)


def messages_of(*messages: tuple[str, Any], **fields: Any) -> list[Any]:
    given = [{"role": role, "content": content} for role, content in messages]
    found: list[Any] = json.loads(parsed(messages=given, **fields).messages.messages)
    return [(each.pop("role"), each.pop("content"), *([each] if each else [])) for each in found]


def test_one_text_block_is_the_same_as_a_string() -> None:
    assert messages_of(("user", [text("x")])) == messages_of(("user", "x")) == [("user", "x")]


def test_system_prompt_is_the_first_message() -> None:
    assert messages_of(("user", "x"), system="be kind")[0] == ("system", "be kind")
    parts = [text("be"), text("kind")]
    assert messages_of(("user", "x"), system=parts)[0] == ("system", parts)
    assert messages_of(("user", "x"), system=[]) == [("user", "x")]


def test_system_messages_stay_where_they_are() -> None:
    given = [("user", "a"), ("system", "b"), ("system", "c"), ("user", "d")]
    assert messages_of(*given) == given


def test_consecutive_messages_of_a_role_become_one() -> None:
    found = messages_of(("user", "a"), ("user", [text("b")]), ("assistant", "c"), ("assistant", ""))
    assert found == [("user", [text("a"), text("b")]), ("assistant", [text("c"), text("")])]


def test_calls_and_results_have_their_own_form() -> None:
    thought = {"type": "thinking", "thinking": "why", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    found = messages_of(
        ("user", "sum?"),
        ("assistant", [thought, hidden, text("I add."), *CALLS]),
        ("user", [result("1", content="1"), result("0"), text("so?")]),
    )
    assert found == [
        ("user", "sum?"),
        ("assistant", "I add.", {"reasoning_content": "why", "tool_calls": PLAIN_CALLS}),
        ("tool", "1", {"name": "look_up", "tool_call_id": "1"}),
        ("tool", "", {"name": "add", "tool_call_id": "0"}),
        ("user", "so?"),
    ]


def test_message_with_only_calls_has_no_content() -> None:
    call = [("user", "x"), ("assistant", CALLS[:1]), ("user", [result("0")])]
    assert messages_of(*call)[1] == ("assistant", None, {"tool_calls": PLAIN_CALLS[:1]})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, "Error: "),
        ({"content": "no"}, "Error: no"),
        ({"content": [text("no"), text("way")]}, [text("Error: no"), text("way")]),
    ],
)
def test_failed_result_begins_with_the_word_error(content: Any, expected: Any) -> None:
    failed = result("0", is_error=True, **content)
    found = messages_of(("user", "x"), ("assistant", CALLS[:1]), ("user", [failed]))
    assert found[-1][1] == expected


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([("user", [result("0")])], r"messages.0.content.0.tool_use_id is '0'"),
        (
            [("user", "x"), ("assistant", [result("0")]), ("user", "x")],
            "messages.1.content.0: a block of type 'tool_result'",
        ),
        ([("user", CALLS[:1])], "messages.0.content.0: a block of type 'tool_use'"),
        (
            [("user", "x"), ("system", CALLS[:1])],
            "messages.1.content.0: a block of type 'tool_use'",
        ),
        (
            [("user", "x"), ("assistant", CALLS)],
            "messages.1.content.1: the answer continues the last message",
        ),
        ([("assistant", []), ("user", "x")], "messages.0.content is empty"),
        ([("user", [{**text("x"), "citations": [1]}])], "messages.0.content.0.citations"),
    ],
)
def test_block_that_does_not_belong_is_refused_by_its_path(messages: Any, problem: str) -> None:
    with pytest.raises(ServingError, match=problem) as refusal:
        messages_of(*messages)
    assert refusal.value.param == "messages"


def test_deep_inputs_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(BOUNDS.max_json_depth):
        deep = {"a": deep}
    call = {**CALLS[0], "input": deep}
    with pytest.raises(ServingError, match="messages is nested more than 64 levels deep"):
        messages_of(("user", "x"), ("assistant", [call]), ("user", [result("0")]))


def test_lists_are_counted_with_nested_blocks() -> None:
    nested = result("0", content=[text("x")] * BOUNDS.max_content_pieces)
    with pytest.raises(
        ServingError, match="messages has 4098 content parts; at most 4096 are allowed"
    ):
        messages_of(("user", "x"), ("assistant", CALLS[:1]), ("user", [nested]))


@pytest.mark.asyncio
@pytest.mark.parametrize("filler", [0, 40_000])
async def test_helper_process_returns_the_same_body(filler: int) -> None:
    history = [
        {"role": "user", "content": "x" * filler + "y"},
        {"role": "assistant", "content": "It is"},
    ]
    fields = {
        "messages": history,
        "system": [text("be kind")],
        "tools": [ADD],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "low"},
    }
    own = parsed(**fields)
    data = json.dumps({"model": "stub", "max_tokens": 5, **fields}).encode()
    sent = await read_parsed(parse_job(BOUNDS, job_items("messages", data, MODEL)))
    assert sent.messages == own.messages
    known = {"thinking", "reasoning_effort"}
    for each in (own, sent):
        body: MessagesBody = each.body
        body.read_kept(each.kept)
        variables = {"thinking": True, "reasoning_effort": "low"}
        assert body.template_options(known) == TemplateOptions(
            add_generation_prompt=False, continue_final_message=True, variables=variables
        )
        options = body.parsing_options(each.messages)
        assert (options.reads_calls, options.is_parallel) == (True, False)
        assert body.omits_thinking


def test_examples_of_inputs_are_examples_of_the_schema() -> None:
    tool = {**ADD, "input_examples": [{"a": 1}]}
    (plain,) = json.loads(
        parsed(messages=[{"role": "user", "content": "x"}], tools=[tool]).messages.tools
    )
    assert plain["function"]["parameters"] == {**ADD["input_schema"], "examples": [{"a": 1}]}


@pytest.mark.parametrize(
    ("thinking", "known", "reasons", "allowed"),
    [
        ("disabled", set(), False, True),
        ("disabled", set(), True, False),
        ("disabled", {"enable_thinking"}, True, True),
        ("enabled", set(), False, False),
        ("enabled", set(), True, True),
        ("enabled", {"thinking"}, False, True),
        ("adaptive", set(), False, True),
        ("adaptive", set(), True, True),
    ],
)
def test_thinking_needs_a_model_that_has_the_mode(
    thinking: str, known: set[str], reasons: bool, allowed: bool
) -> None:
    budget = {"budget_tokens": 1024} if thinking == "enabled" else {}
    hello = [{"role": "user", "content": "x"}]
    body: MessagesBody = parsed(
        messages=hello, thinking={"type": thinking, **budget}, max_tokens=2000
    ).body
    if allowed:
        body.check_model(known, reasons)
        return
    with pytest.raises(ServingError, match="because this model"):
        body.check_model(known, reasons)


def test_budget_reaches_a_template_that_reads_it() -> None:
    hello = [{"role": "user", "content": "x"}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body: MessagesBody = parsed(messages=hello, thinking=thinking, max_tokens=2000).body
    assert body.template_options({"thinking_budget"}).variables == {"thinking_budget": 1024}


def test_forced_calls_exclude_reasoning_and_a_continued_message() -> None:
    hello = [{"role": "user", "content": "x"}]
    forced = {"tools": [ADD], "tool_choice": {"type": "any"}, "max_tokens": 2000}
    for fields in (
        {"messages": hello, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [*hello, {"role": "assistant", "content": "I"}]},
    ):
        with pytest.raises(ServingError, match="tool_choice"):
            parsed(**forced, **fields)
