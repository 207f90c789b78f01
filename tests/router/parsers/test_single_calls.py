"""`parallel_tool_calls: false` in each format: one call, and nothing after it."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from penstock.router.parsers.answer_parser import AnswerParsers, ParsingOptions
from penstock.router.parsers.parser_names import NONE, TOOL_PARSERS
from penstock.router.parsers.tools.tool_parameters import ToolParameters, function_lines
from tests.support.parsed import check_splits
from tests.support.strict_model import END, Model
from tests.support.two_calls import FIRST, FUNCTIONS, SECOND, WRITERS

TOOLS = ToolParameters(
    function_lines([{"type": "function", "function": each} for each in FUNCTIONS])
)
CASES = [(name, index) for name, writers in WRITERS.items() for index, _ in enumerate(writers)]
PROMPT: Mapping[str, str] = {"openai": "<|start|>assistant"}

each_way = pytest.mark.parametrize(("name", "way"), CASES)


def test_every_format_is_tested() -> None:
    assert WRITERS.keys() == TOOL_PARSERS.keys()


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special tokens"])
def model_of(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    models: dict[str, Model] = {}

    def found(name: str) -> Model:
        if name == "openai" and not request.param:
            pytest.skip("the format has a grammar only if its markers are special tokens")
        if name not in models:
            models[name] = Model(tmp_path_factory.mktemp(name), name, request.param)
        return models[name]

    return found


def accepted(model: Model, name: str, text: str, is_parallel: bool = False) -> str:
    return model.accepted(text, PROMPT.get(name, "hello"), FUNCTIONS, is_parallel)


def calls_of(name: str, text: str, model: Model, is_strict: bool) -> list[tuple[str, Any]]:
    """Parse an answer with `parallel_tool_calls: false`; return its calls."""
    options = ParsingOptions(reads_calls=True, is_parallel=False, is_strict=is_strict, tools=TOOLS)
    parsers = AnswerParsers(tools=name, reasoning=NONE)
    make: Any = lambda: parsers.new("", options)  # noqa: E731
    answer = check_splits(make, text, model.tokenizer.tokenizer)
    assert answer.content.strip() in ("", "<")  # only the first character of a tag may be left
    return [(called, json.loads(arguments)) for called, arguments in answer.calls]


@each_way
@pytest.mark.parametrize("is_strict", [False, True])
def test_parser_keeps_the_first_call(
    model_of: Callable[[str], Model], name: str, way: int, is_strict: bool
) -> None:
    text = WRITERS[name][way](FIRST, SECOND)
    assert calls_of(name, text, model_of(name), is_strict) == [FIRST]


@each_way
def test_grammar_ends_the_answer_after_one_call(
    model_of: Callable[[str], Model], name: str, way: int
) -> None:
    model, write = model_of(name), WRITERS[name][way]
    both, one = write(FIRST, SECOND), write(FIRST)
    assert accepted(model, name, both, is_parallel=True) == both
    assert accepted(model, name, one) == one
    begun = accepted(model, name, both)
    assert len(begun) < len(both)
    assert calls_of(name, begun, model, is_strict=True) == [FIRST]
    for text in ("x", "\n\nI am done.", one):
        found = accepted(model, name, one + text)
        assert found.rstrip().removesuffix("<") == one


@each_way
def test_answer_may_end_only_after_the_call(
    model_of: Callable[[str], Model], name: str, way: int
) -> None:
    model = model_of(name)
    matcher = model.matcher(PROMPT.get(name, "hello"), FUNCTIONS, is_parallel=False)
    text = WRITERS[name][way](FIRST)
    tokens = model.tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
    for token in tokens[:-1]:
        assert matcher.advance([token])
    assert matcher.inner.validate_tokens([tokens[-1], END]) == 2


@pytest.mark.parametrize("name", WRITERS)
def test_answers_without_calls_and_text_before_a_call_are_free(
    model_of: Callable[[str], Model], name: str
) -> None:
    model = model_of(name)
    if name == "openai":
        begun = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
        ended = "<|channel|>final<|message|>It is 42.<|return|>"
        texts = [f"{begun}{ended}", f"{begun}{WRITERS[name][0](FIRST)}"]
    else:
        texts = ["", "Hello\n [world] { <", "a<unk>b <tool>"]
        free = [write for write in WRITERS[name] if write(FIRST)[0] == "<" or name == "mistral"]
        texts += [f"I <do> {{it}}.\n\n{write(FIRST)}" for write in free]
    for text in texts:
        assert accepted(model, name, text) == text


@pytest.mark.parametrize("is_special", [False, True])
def test_one_call_follows_reasoning(tmp_path: Any, is_special: bool) -> None:
    model = Model(tmp_path, "hermes", is_special, "qwen3")
    (write,) = WRITERS["hermes"]
    for begun in ("", "<think>I add. <tool_call></think>\n\n", "Hello"):
        text = begun + write(FIRST)
        assert model.accepted(text, "hello", FUNCTIONS, is_parallel=False) == text
        found = model.accepted(text + write(SECOND), "hello", FUNCTIONS, is_parallel=False)
        assert found == text


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "openai"])
def test_markers_may_be_added_tokens_that_are_not_special(tmp_path: Any, name: str) -> None:
    model = Model(tmp_path, name, False, "qwen3", is_added=True)
    for write in WRITERS[name]:
        both = write(FIRST, SECOND)
        for text in (both, f"<think>I add.</think>\n\n{both}"):
            assert accepted(model, name, text, is_parallel=True) == text
            assert accepted(model, name, text) != text
