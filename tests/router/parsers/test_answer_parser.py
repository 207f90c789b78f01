"""Reasoning and tool calls together, parser names, and parsers chosen by the chat template."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.parsers.answer_parser import AnswerParsers, ParsingOptions
from penstock.router.parsers.parser_names import (
    HARMONY_REASONING,
    NONE,
    REASONING_TAGS,
    TOOL_PARSERS,
    detect_reasoning_parser,
    detect_tool_parser,
)
from penstock.router.parsers.pieces import CONTENT, Piece
from tests.support.parsed import Answer, answer_of, check_splits, parse
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
TOOLS = ParsingOptions(reads_calls=True)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
QWEN = AnswerParsers("{{ tools }}<tool_call><think>")


def answer(parsers: AnswerParsers, text: str, options: ParsingOptions, end: str = "") -> Answer:
    def make() -> Any:
        return parsers.new(end, options)

    return check_splits(make, text, TOKENIZER)


def test_reasoning_comes_before_calls() -> None:
    text = f"<think>\n{CALL}?\n</think>\n\nI add.\n{CALL}{CALL}"
    calls = (("add", '{"a": 1}'),)
    assert answer(QWEN, text, TOOLS) == Answer("I add.", calls * 2, f"{CALL}?")
    assert answer(QWEN, f"x</think>{CALL}", TOOLS, "<think>\n") == Answer("", calls, "x")


def test_calls_are_content_if_there_are_no_tools() -> None:
    assert answer(QWEN, CALL, ParsingOptions()) == Answer(CALL)


def test_only_the_first_call_is_kept_if_calls_are_not_parallel() -> None:
    options = ParsingOptions(reads_calls=True, is_parallel=False)
    assert answer(QWEN, CALL * 3, options) == Answer("", [("add", '{"a": 1}')])


def test_reasoning_can_be_left_out() -> None:
    options = ParsingOptions(shows_reasoning=False)
    assert answer(QWEN, "<think>why</think>x", options) == Answer("x")


def test_forced_answers_are_calls() -> None:
    text = '[{"name": "add", "parameters": {"a": 1}}, {"name": "now", "parameters": {}}]'
    calls = (("add", '{"a": 1}'), ("now", "{}"))
    assert answer(AnswerParsers(), text, ParsingOptions(is_forced=True)) == Answer("", calls)
    named = ParsingOptions(is_forced=True, forced_name="add")
    for parsers in (AnswerParsers(), QWEN, AnswerParsers(reasoning=HARMONY_REASONING)):
        assert answer(parsers, '{"a": 1}', named, "<think>\n") == Answer("", calls[:1])


@pytest.mark.parametrize("tools", ["llama3_json", "llama4_json", "hermes", "pythonic"])
def test_content_of_a_given_form_has_no_calls(tools: str) -> None:
    text = '{"name": "add", "parameters": {"a": 1}}'
    options = ParsingOptions(reads_calls=True, has_form=True)
    assert AnswerParsers(tools=tools).new("", options) is None
    assert not AnswerParsers(tools=tools).may_find(options)
    reasons = AnswerParsers(tools=tools, reasoning="qwen3")
    for content in (text, CALL, "[add(a=1)]"):
        found = answer(reasons, f"<think>why</think>{content}", options)
        assert found == Answer(content, (), "why")


def test_answers_without_anything_to_find_have_no_parser() -> None:
    assert AnswerParsers("{{ messages }}").new("", TOOLS) is None
    assert AnswerParsers("{{ tools }}<tool_call>").new("", ParsingOptions()) is None
    assert AnswerParsers("<think>", reasoning=NONE).new("", ParsingOptions()) is None


def test_long_texts_are_parsed_in_steps() -> None:
    text = "x" * 5000 + CALL
    parser = QWEN.new("", TOOLS)
    assert parser is not None
    assert answer_of(parse(parser, [text])) == Answer("x" * 5000, [("add", '{"a": 1}')])


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", NONE, NONE),
        ("{{ tools }}<tool_call>{'name': ...", "hermes", NONE),
        ("{{ tools }}<tool_call> <think>", "hermes", "qwen3"),
        ("{{ tools }}<tool_call><function=<parameter=", "qwen3_coder", NONE),
        ("{{ tools }}<tool_call>{{ name }}<arg_key><think>", "glm45", "qwen3"),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi_k2", NONE),
        ("{{ tools }}[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("{{ tools }}<|python_tag|>", "llama3_json", NONE),
        ("{{ tools }}<|python_start|>", "llama4_pythonic", NONE),
        ("{{ tools }}[func_name1(params_name1=", "pythonic", NONE),
        ("{{ tools }}<|start|><|channel|>", "openai", "openai_gptoss"),
        ("{{ tools }}<|tool|>", "phi4_mini_json", NONE),
        ("{{ tools }}<start_function_call>", "functiongemma", NONE),
        ("{{ tools }}<|tool_call><|channel>thought", "gemma4", "gemma4"),
        ("{{ tools }}<\uff5ctool▁call▁begin\uff5c>```json", "deepseek_v3", NONE),
        ("{{ tools }}<\uff5ctool▁call▁begin\uff5c></think>", "deepseek_v31", "qwen3"),
        ("<tool_call>", NONE, NONE),
    ],
)
def test_template_chooses_the_parsers(template: str, tools: str, reasoning: str) -> None:
    assert detect_tool_parser(template) == tools
    assert detect_reasoning_parser(template) == reasoning
    parsers = AnswerParsers(template)
    assert (parsers.tools, parsers.reasoning) == (tools, reasoning)


def test_names_have_precedence_over_the_template() -> None:
    parsers = AnswerParsers("{{ tools }}<tool_call>", tools="mistral", reasoning="deepseek_r1")
    assert (parsers.tools, parsers.reasoning) == ("mistral", "deepseek_r1")


@pytest.mark.parametrize("field", ["tools", "reasoning"])
def test_unknown_names_are_refused_with_the_list(field: str) -> None:
    with pytest.raises(
        ValueError, match="unknown parser 'gpt9': expected one of auto, none, deepseek_"
    ) as error:
        AnswerParsers(**{field: "gpt9"})
    known = TOOL_PARSERS if field == "tools" else REASONING_TAGS
    assert all(name in str(error.value) for name in known)


FRAGMENTS = sorted(
    {
        *(marker for kind in TOOL_PARSERS.values() for marker in kind.markers),
        *(mark for tags in REASONING_TAGS.values() if tags for mark in (tags.start, tags.end)),
        *("functools[", '{"name": "f", "arguments": {"a": [1, "x"]}}', '"name"', "call:f", "f(a="),
        *("[", "]", "{", "}", "(", ")", ",", ":", ";", '"', "'", "\\", "=", "\n", " ", "x", "é"),
        *("to=functions.f", "analysis", "final", "```json", "1", "null", "<", "f"),
        *("<function=f>", "<function=", "</function>", "<parameter=a>", "</parameter>", "f:0"),
    }
)
NAMES = [("hermes", "qwen3"), (NONE, HARMONY_REASONING)] + [
    (name, NONE) for name in TOOL_PARSERS if name != "hermes"
]


@given(
    st.sampled_from(NAMES),
    st.lists(st.sampled_from(FRAGMENTS), max_size=24),
    st.lists(st.integers(1, 6), min_size=1),
)
def test_any_text_is_the_same_in_any_split(
    names: tuple[str, str], fragments: Sequence[str], lengths: Sequence[int]
) -> None:
    text = "".join(fragments)
    pieces, at, number = [], 0, 0
    while at < len(text):
        end = at + lengths[number % len(lengths)]
        pieces.append(text[at:end])
        at, number = end, number + 1
    tools, reasoning = names
    parsers = AnswerParsers(tools=tools, reasoning=reasoning)
    whole, split = (parsers.new("", TOOLS) for _ in range(2))
    assert whole is not None
    assert split is not None
    found = parse(whole, [text])
    assert parse(split, pieces) == found
    answer_of(found)  # checks that each call begins before its arguments


@given(st.text(st.characters(exclude_characters="<[{f"), max_size=40))
def test_text_without_markers_is_content(text: str) -> None:
    for name in set(TOOL_PARSERS) - {"openai"}:
        parser = AnswerParsers(tools=name, reasoning=NONE).new("", TOOLS)
        assert parser is not None
        assert parse(parser, [text]) == ([Piece(CONTENT, text)] if text else [])
