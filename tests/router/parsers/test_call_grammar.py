"""Grammars of answers in which the calls of strict functions fit their schema."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.common.grammar.grammar_text import grammar_text
from penstock.router.errors import ServingError
from penstock.router.parsers.parser_names import REASONING_TAGS, TOOL_PARSERS
from penstock.router.parsers.pieces import CALL
from penstock.router.parsers.tools.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEP
from penstock.router.parsers.tools.kimi import ARGUMENT_BEGIN, SECTION_BEGIN, SECTION_END
from penstock.router.parsers.tools.kimi import CALL_BEGIN as KIMI_BEGIN
from penstock.router.parsers.tools.kimi import CALL_END as KIMI_END
from penstock.router.requests.strict_calls import strict_calls
from tests.support.strict_model import FUNCTIONS, Model

GOOD = '{"a": 17, "b": "kg"}'
LOOSE = '{ "x" : [1,\n 2] }'

HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
LISTED = '{{"name": "{}", "arguments": {}}}'
LLAMA = '{{"name": "{}", "parameters": {}}}'
CALLS: Mapping[str, Sequence[str]] = {
    "hermes": [HERMES, '<tool_call>{{"name":"{}","arguments":{}}}</tool_call>'],
    "llama3_json": [LLAMA, f"<|python_tag|>{LLAMA}", f"\n{LLAMA}; {LLAMA}"],
    "llama4_json": [LLAMA],
    "mistral": [
        f"[TOOL_CALLS][{LISTED}]",
        f"[TOOL_CALLS] [{LISTED}, {LISTED}]",
        "[TOOL_CALLS]{}{}",
        "[TOOL_CALLS]{}[ARGS]{}[TOOL_CALLS]{}[ARGS]{}",
        "[TOOL_CALLS]{}[CALL_ID]123abcdef[ARGS]{}",
    ],
    "phi4_mini_json": [f"<|tool_call|>[{LISTED}]<|/tool_call|>", f"functools[{LISTED}, {LISTED}]"],
    "deepseek_v31": [
        f"{CALLS_BEGIN}{CALL_BEGIN}{{}}{SEP}{{}}{CALL_END}{CALLS_END}",
        f"{CALLS_BEGIN}{CALL_BEGIN}{{}}{SEP}{{}}{CALL_END}"
        f"{CALL_BEGIN}{{}}{SEP}{{}}{CALL_END}{CALLS_END}",
    ],
    "deepseek_v3": [
        f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}{{}}\n```json\n{{}}\n```{CALL_END}{CALLS_END}"
    ],
    "kimi_k2": [
        f"{SECTION_BEGIN}{KIMI_BEGIN}functions.{{}}:0{ARGUMENT_BEGIN}{{}}{KIMI_END}{SECTION_END}"
    ],
}
"""Text of a call in each format that has a grammar; {} stands for the name and the arguments."""

FIRST = ("llama3_json", "llama4_json")
"""Formats whose calls must be at the start of an answer unless they begin with a special token."""


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special tokens"])
def models(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Model]:
    return {name: Model(tmp_path_factory.mktemp(name), name, request.param) for name in CALLS}


def filled(call: str, *calls: tuple[str, str]) -> str:
    count = call.count("{}")
    return call.format(*[each for pair in calls * 2 for each in pair][:count])


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_fit_are_allowed_between_any_text(
    models: Mapping[str, Model], name: str
) -> None:
    model = models[name]
    for call in CALLS[name]:
        for pair in (("add", GOOD), ("see", LOOSE), ("now.utc", "{}"), ("add", '{"a":-1}')):
            text = filled(call, pair)
            assert model.accepted(text) == text
            if name not in FIRST or call.startswith("<"):
                text = f"I <do> {{it}}.\n\n{text}"
                assert model.accepted(text) == text
    for text in ("", "Hello\n [world] { <", '{"a": 5}', "</s>", "a<unk>b"):
        assert model.accepted(text) == text


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_do_not_fit_are_cut_at_the_first_wrong_token(
    models: Mapping[str, Model], name: str
) -> None:
    model = models[name]
    for call in CALLS[name]:
        for pair, last in (
            (("add", '{"a": "x"}'), '{"a": '),
            (("add", '{"b": "kg"}'), '{"'),
            (("add", '{"a": 1, "b": "x"}'), '{"a": 1, "b": "'),
            (("add", '{"a": 1, "c": 2}'), '{"a": 1, "'),
            (("see", "5"), ""),
            (("now.utc", '{"a": 1}'), "{"),
        ):
            text = filled(call, pair)
            found = model.accepted(text)
            expected = text[: text.index(pair[1]) + len(last)]
            assert text.startswith(found)
            assert len(expected) - 2 <= len(found) <= len(expected), (found, expected)
        unknown = filled(call, ("other", "{}"))
        assert "other" not in model.accepted(unknown)


@pytest.mark.parametrize("name", CALLS)
def test_parser_finds_the_calls_that_the_grammar_allows(
    models: Mapping[str, Model], name: str
) -> None:
    for call in CALLS[name]:
        text = filled(call, ("add", GOOD))
        parser = TOOL_PARSERS[name]()
        pieces = [*parser.feed(text), *parser.finish()]
        assert {piece.text for piece in pieces if piece.kind == CALL} == {"add"}


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("reasoning", ["qwen3", "mistral", "deepseek_r1"])
def test_reasoning_is_free(tmp_path: Path, reasoning: str, is_special: bool) -> None:
    model = Model(tmp_path, "hermes", is_special, reasoning)
    tags = REASONING_TAGS[reasoning]
    assert tags is not None
    good, bad = HERMES.format("add", GOOD), "<tool_call>no call"
    closed, opened = ("hello" + tags.end, "hello" + tags.start)
    for inside in ("I think", bad):
        text = f"{tags.start}{inside}{tags.end}\n\n{good}"
        assert model.accepted(text, closed) == text
        assert model.accepted(text.removeprefix(tags.start), opened) == text.removeprefix(
            tags.start
        )
        assert model.accepted(f"\n{text}", closed) == f"\n{text}"
        assert model.accepted(f"{tags.start}{inside}", closed) == f"{tags.start}{inside}"
    assert model.accepted(good, closed) == good
    assert model.accepted(bad, closed) == "<tool_call>"
    text = f"{tags.start}x{tags.end}{bad}"
    assert model.accepted(text, closed) == text.removesuffix("no call")


def test_harmony_needs_its_special_tokens(tmp_path: Path) -> None:
    with pytest.raises(
        ServingError, match=r"'strict' is not supported .* format openai "
    ) as refusal:
        Model(tmp_path, "openai", False).matcher()
    assert refusal.value.param == "tools"


@pytest.mark.parametrize("is_special", [False, True])
def test_text_before_the_start_of_reasoning_is_no_reasoning(
    tmp_path: Path, is_special: bool
) -> None:
    model = Model(tmp_path, "hermes", is_special, "mistral")
    bad = "<tool_call>no call"
    for text in (f"a[THINK]{bad}", f"{bad}[THINK]x", f"a<unk>[THINK]{bad}", f"[/THINK]{bad}"):
        assert model.accepted(text) == text.partition("no call")[0]
    good = HERMES.format("add", GOOD)
    for text in (f"a[THINK]{good}", f"\n[THINK]{bad}[/THINK]{good}", f"{good}[THINK]{good} x"):
        assert model.accepted(text) == text
    for text in (
        "",
        "\n",
        "a\n",
        "\n<unk>a",
        "[THINK]a",
        f"\n{good}\n{good}",
        " [THINK]a[/THINK]b",
    ):
        assert model.accepted(text) == text


def test_functions_without_strict_need_no_grammar() -> None:
    assert strict_calls([{"name": "add"}, {"name": "see", "strict": False}]) == b""
    names, schemas = map(json.loads, strict_calls(FUNCTIONS).splitlines())
    assert names == ["add", "see", "now.utc"]
    assert [schema is None for schema in schemas] == [False, True, False]


def test_schemas_of_strict_functions_are_bounded_when_their_grammar_is_made(tmp_path: Path) -> None:
    model = Model(tmp_path, "hermes", False)
    function = {"name": "add", "strict": True, "parameters": {"description": "é\n\u2028"}}
    form = model.parsers.strict_form([5], strict_calls([function, {"name": "see"}]))
    content = json.loads(form.text)
    assert set(content) == {"grammar", "names", "arguments", "notation"}
    assert content["names"] == ["add", "see"]
    assert content["arguments"] == [function["parameters"], None]
    long = {"name": "add", "strict": True, "parameters": {"enum": ["x" * 131_060]}}
    calls = strict_calls([long])
    assert len(calls) < 100
    with pytest.raises(ServingError, match="'strict' have 131076 bytes as JSON; at most 131072"):
        model.parsers.strict_form([5], calls)


def test_refusal_of_a_schema_names_the_keyword(tmp_path: Path) -> None:
    model = Model(tmp_path, "hermes", False)
    function = {"name": "add", "strict": True, "parameters": {"type": "object", "not": {}}}
    form = model.parsers.strict_form([5], strict_calls([function]))
    assert grammar_text(form)
    with pytest.raises(Exception, match=r"schema of strict tools: function add, at /not: .*not"):
        model.vocabulary.compile(form)
