"""Grammars of answers with free reasoning whose content has a given form."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.common.grammar.grammar_text import check_structured_outputs, grammar_text
from penstock.common.grammar.matcher import Matcher
from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.sampling_params import SamplingParams
from penstock.common.structured_outputs import (
    AFTER_REASONING,
    MAX_BYTES,
    StructuredOutputs,
    after_reasoning,
    choice,
    json_schema,
)
from penstock.router.parsers.answer_parser import ParsingOptions
from penstock.router.parsers.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, ROLE, START
from penstock.router.parsers.parser_names import REASONING_TAGS
from penstock.router.requests.strict_calls import strict_calls
from penstock.workers.sampling.mask_processors import mask_processors
from tests.support.parsed import answer_of, parse
from tests.support.strict_model import END as END_TOKEN
from tests.support.strict_model import FUNCTIONS, Model

NAME: Mapping[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
TAGGED = {
    "structures": [{"begin": "<f>", "end": "</f>", "schema": NAME}],
    "triggers": ["<f"],
}
SCHEMA = json_schema(NAME)
FORMS: Sequence[tuple[StructuredOutputs, str, str]] = [
    (SCHEMA, '{"name": "a b"}', '{"names'),
    (StructuredOutputs("json_object"), '{"a": [1]}', "[1"),
    (choice(["yes", "no way"]), "no way", "now"),
    (StructuredOutputs("regex", "[a-z]+ [0-9]{2,}"), "abc 123", "abc x"),
    (StructuredOutputs("grammar", 'start: "a" TEXT SPACE\nTEXT: /b+/\nSPACE: "q"'), "abbq", "ac"),
    (StructuredOutputs("grammar", 'root ::= "a" x\nx ::= [b-d]+'), "abcd", "ax"),
    (StructuredOutputs("structural_tag", json.dumps(TAGGED)), 'x <f>{"name": "a"}</f>', "<f>x"),
]
"""Constraints of each kind, each with a text that satisfies it, and with one that does not."""

THOUGHTS = ("", "\nI think: <g>{[1, 2]}\n<b>\n")
HEADER = START + ROLE


@pytest.fixture(scope="module", params=["text", "special tokens", "added tokens"])
def qwen(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder, kind = tmp_path_factory.mktemp("qwen"), request.param
    return Model(folder, "hermes", kind == "special tokens", "qwen3", kind == "added tokens")


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("harmony"), "openai", True, "openai_gptoss")


def is_complete(matcher: Matcher) -> bool:
    """Return whether an end token is allowed."""
    words = np.zeros(matcher.num_words, np.int32)
    matcher.fill(words)
    return bool(words[END_TOKEN // 32] >> END_TOKEN % 32 & 1)


def check_allowed(model: Model, prompt: str, form: StructuredOutputs, text: str) -> None:
    matcher = model.form_matcher(prompt, form)
    assert model.read(matcher, text) == text
    assert is_complete(matcher)


@pytest.mark.parametrize("index", range(len(FORMS)))
def test_form_applies_after_the_reasoning(qwen: Model, index: int) -> None:
    form, good, bad = FORMS[index]
    for inside in THOUGHTS:
        for space in ("", "\n\n"):
            begun = f"{inside}</think>{space}"
            check_allowed(qwen, "hello<think>\n", form, begun + good)
            check_allowed(qwen, "hello<think>\n", form, f"no <f>{begun}{good}")
            check_allowed(qwen, "hello", form, f"<think>{begun}{good}")
            wrong = begun + bad
            assert qwen.read(qwen.form_matcher("hello<think>", form), wrong) != wrong
    check_allowed(qwen, "hello", form, good)
    assert qwen.read(qwen.form_matcher("hello", form), bad) != bad


def test_answer_does_not_end_before_its_content_is_complete(qwen: Model) -> None:
    matcher = qwen.form_matcher("hello<think>\n", SCHEMA)
    for text in ("", "I", ' think {"name": "a"}', "</think>", "\n\n", '{"name": "a"'):
        assert qwen.read(matcher, text) == text
        assert not is_complete(matcher)
        assert not matcher.is_broken
    assert not qwen.form_matcher("hello<think>\n", SCHEMA).advance([END_TOKEN])
    assert qwen.read(matcher, "}") == "}"
    assert is_complete(matcher)


def test_parser_finds_the_content_that_the_grammar_allows(qwen: Model) -> None:
    options = ParsingOptions(has_form=True)
    for form, good, _ in FORMS:
        for prompt, start in (("hello<think>\n", ""), ("hello", "<think>")):
            text = f"{start}why?\n</think>\n\n{good}"
            check_allowed(qwen, prompt, form, text)
            tokens = qwen.tokenizer.encode(prompt, add_special_tokens=False)
            parsing = qwen.parsers.parsing(tokens, "me", options)
            assert parsing is not None
            parser = parsing.new_parser()
            assert parser is not None
            found = answer_of(parse(parser, [text]))
            assert (found.content, found.reasoning) == (good, "why?")


def test_form_applies_to_the_whole_answer_if_there_is_no_reasoning(tmp_path: Path) -> None:
    model = Model(tmp_path, "hermes", False, "qwen3")
    for prompt in ("hello<think></think>", "hello<think>\n\n</think>\n\n"):
        tokens = model.tokenizer.encode(prompt, add_special_tokens=False)
        assert model.parsers.answer_form(tokens, SCHEMA) == SCHEMA
    without = Model(tmp_path / "without", "hermes", False)
    assert without.parsers.answer_form([5], SCHEMA) == SCHEMA


def test_start_tag_may_be_missing_or_repeated(tmp_path: Path) -> None:
    for is_special in (False, True):
        model = Model(tmp_path / str(is_special), "hermes", is_special, "deepseek_r1")
        for start in ("", "<think>", "\n<think>\n"):
            for prompt in ("hello", "hello<think>\n"):
                check_allowed(model, prompt, SCHEMA, f'{start}a</think>{{"name": "b"}}')
        assert model.read(model.form_matcher("hello", SCHEMA), '{"name": "b"}') == '{"name": "b"}'
        assert not is_complete(model.form_matcher("hello", SCHEMA))


def test_continued_message_needs_no_reasoning(tmp_path: Path) -> None:
    model = Model(tmp_path, "hermes", True, "deepseek_r1")
    tokens = model.tokenizer.encode("hello", add_special_tokens=False)
    assert not model.parsers.thinking_budget(20, tokens).start
    assert model.parsers.thinking_budget(20, tokens, continues_message=True).start
    form = model.parsers.answer_form(tokens, SCHEMA, continues_message=True)
    matcher = model.vocabulary.compile(form).matcher()
    assert model.read(matcher, '{"name": "b"}') == '{"name": "b"}'
    assert is_complete(matcher)
    calls = model.parsers.strict_form(tokens, strict_calls(FUNCTIONS), continues_message=True)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert model.read(model.vocabulary.compile(calls).matcher(), f"I add.{call}") == f"I add.{call}"
    # The call of a new message would be reasoning, in which nothing is constrained.
    wrong = f"I add.{call.replace('1', 'x')}"
    assert model.read(model.vocabulary.compile(calls).matcher(), wrong) != wrong


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("name", [name for name, tags in REASONING_TAGS.items() if tags])
def test_tags_of_each_model(tmp_path: Path, name: str, is_special: bool) -> None:
    tags = REASONING_TAGS[name]
    assert tags is not None
    model = Model(tmp_path, "hermes", is_special, name, is_added=not is_special)
    for inside in THOUGHTS:
        text = f'{inside}{tags.end}\n{{"name": "b"}}'
        check_allowed(model, f"hello{tags.start}\n", SCHEMA, text)
        check_allowed(model, "hello", SCHEMA, tags.start + text)
    check_allowed(model, f"hello{tags.end}", SCHEMA, '{"name": "b"}')


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("prompt", ["hello", "hello<think>\n"])
def test_budget_ends_the_reasoning_and_content_follows(
    tmp_path: Path, prompt: str, is_special: bool
) -> None:
    model = Model(tmp_path, "hermes", is_special, "qwen3", is_added=not is_special)
    tokens = model.tokenizer.encode(prompt, add_special_tokens=False)
    form = model.parsers.answer_form(tokens, choice(["yes", "no way"]))
    limit = model.parsers.thinking_budget(20, tokens)
    params = SamplingParams(
        structured_outputs=form, thinking_budget=limit, stop_token_ids=(END_TOKEN,)
    )
    grammar = model.vocabulary.compile(form)
    size, token_bytes = model.tokenizer.vocab_size, model.tokenizer.token_bytes
    is_ascii = {token for token in range(size) if token_bytes.bytes_of(token).isascii()}
    lengths = set()
    for seed in range(20):
        random = np.random.default_rng(seed)
        processors = mask_processors(params, grammar.num_words * 32, grammar.num_words, grammar)
        log = [*tokens, *limit.start]
        while log[-1] != END_TOKEN:
            words = np.full(grammar.num_words, -1, np.int32)
            for each in processors:
                each.exclude(words, np.array(log, np.int32), len(tokens))
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            # Within a character of several bytes, the grammar excludes the end of the reasoning.
            log.append(int(random.choice([each for each in allowed if each in is_ascii])))
        answer = model.decoded(log[len(tokens) :])
        reasoning, _, content = answer.removesuffix("</s>").partition("</think>")
        assert content.lstrip() in ("yes", "no way")
        assert reasoning.startswith("<think>" if limit.start else "")
        lengths.add(log.index(limit.end, len(tokens)) - len(tokens) - len(limit.start))
    assert max(lengths) == 20


def test_form_is_the_final_message_of_harmony(harmony: Model) -> None:
    analysis = f"{CHANNEL}analysis{MESSAGE}why {{}}\n{END}{HEADER}"
    final = f"{CHANNEL}final"
    for form, good, bad in FORMS:
        for begun in ("", analysis, analysis * 2):
            for head in (final, f"{final} {CONSTRAIN}json", f"{final}{CONSTRAIN}json"):
                check_allowed(harmony, f"hello{HEADER}", form, f"{begun}{head}{MESSAGE}{good}")
            wrong = f"{begun}{final}{MESSAGE}{bad}"
            assert harmony.read(harmony.form_matcher(f"hello{HEADER}", form), wrong) != wrong
        check_allowed(harmony, f"{HEADER}{final}{MESSAGE}", form, good)
    for text in (
        f"{CHANNEL}analysis{MESSAGE}why{CALL}",
        f"{CHANNEL}commentary to=functions.add{MESSAGE}{{",
        " to=functions.add",
        f"{final}{MESSAGE}x",
        "{",
    ):
        matcher = harmony.form_matcher(f"hello{HEADER}", SCHEMA)
        assert harmony.read(matcher, text) != text


def test_parser_finds_the_final_message_of_harmony(harmony: Model) -> None:
    options = ParsingOptions(reads_calls=True, has_form=True)
    good = '{"name": "to=functions.add"}'

    def parser_for(prompt: str) -> Any:
        tokens = harmony.tokenizer.encode(prompt, add_special_tokens=False)
        parsing = harmony.parsers.parsing(tokens, "me", options)
        assert parsing is not None
        return parsing.new_parser()

    text = f"{CHANNEL}analysis{MESSAGE}why{END}{HEADER}{CHANNEL}final{MESSAGE}{good}"
    found = answer_of(parse(parser_for(f"hello{HEADER}"), [text]))
    assert (found.content, found.reasoning, found.calls) == (good, "why", [])
    # The answer continues the final message, so all of it is content.
    assert parser_for(f"{HEADER}{CHANNEL}final{MESSAGE}") is None


def test_without_special_tokens_harmony_has_no_channels(tmp_path: Path) -> None:
    model = Model(tmp_path, "openai", False, "openai_gptoss", is_added=True)
    tokens = model.tokenizer.encode(HEADER, add_special_tokens=False)
    assert model.parsers.answer_form(tokens, SCHEMA) == SCHEMA
    parsing = model.parsers.parsing(tokens, "me", ParsingOptions(has_form=True))
    assert parsing is not None
    parser = parsing.new_parser()
    assert parser is not None
    assert answer_of(parse(parser, ['{"name": ', '"a"}'])).content == '{"name": "a"}'


GRAMMAR = "start: @form\n"


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        (StructuredOutputs("json", '{"not": {}}'), "this JSON Schema at /not: .*not"),
        (StructuredOutputs("json", "{"), "must be a JSON Schema .*, but cannot be parsed"),
        (StructuredOutputs("regex", "(?=a)b"), "cannot compile this regex: "),
        (StructuredOutputs("grammar", "start: other"), "cannot compile this grammar: "),
        (StructuredOutputs("grammar", '{"grammars": 1}'), "grammar"),
        (StructuredOutputs("grammar", '{"grammars": []}'), "grammar"),
        (choice([]), "choice must have 1 to"),
        (choice(["\ud800"]), "unpaired surrogate"),
        (StructuredOutputs("regex", "\ud800"), "unpaired surrogate"),
        (StructuredOutputs("regex", "x" * (MAX_BYTES + 1)), f"has {MAX_BYTES + 1} bytes; at most"),
        (StructuredOutputs("regex", "x" * 8 * MAX_BYTES), f"; at most {MAX_BYTES} are allowed"),
        (StructuredOutputs("regex", ""), "expected a regular expression"),
        (StructuredOutputs("other", "x"), "unknown kind 'other'"),
    ],
)
def test_refusal_is_that_of_the_form(form: StructuredOutputs, problem: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"structured_outputs: .*{problem}"):
        check_structured_outputs(after_reasoning(GRAMMAR, form))


def test_largest_form_is_accepted() -> None:
    form = StructuredOutputs("regex", "\x01" * MAX_BYTES)
    wrapped = after_reasoning(GRAMMAR, form)
    assert wrapped.kind == AFTER_REASONING
    wrapped.validate()
    assert grammar_text(wrapped)
