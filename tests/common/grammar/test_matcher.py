"""Matchers allow exactly the tokens that continue towards an answer of the required form."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from tokenizers import AddedToken

from penstock.common.grammar.cache import MAX_BYTES, GrammarCache
from penstock.common.grammar.grammar_text import grammar_text
from penstock.common.grammar.matcher import (
    CompiledGrammar,
    GrammarVocabulary,
    Matcher,
    fill_masks,
    num_words,
)
from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.structured_outputs import StructuredOutputs, choice, json_schema
from penstock.common.text.tokenizer import ModelTokenizer
from tests.support.memory import resident_bytes
from tests.support.tokenizers import KINDS, id_of, write_folder

TOKENIZER = ModelTokenizer(Path(__file__).parents[3] / "penstock" / "models" / "demo")
END, VOCAB_SIZE = 2, 2100  # some ids below VOCAB_SIZE have no token
VOCABULARY = GrammarVocabulary(TOKENIZER, VOCAB_SIZE, [END])

SCHEMA = json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 3}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


def allowed(matcher: Matcher) -> list[int]:
    words = np.full(num_words(VOCAB_SIZE), -1, np.int32)
    matcher.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def first_refused(grammar: CompiledGrammar, tokens: Sequence[int]) -> int | None:
    """Return the index of the first token that the mask excludes, or None if it excludes none."""
    matcher = grammar.matcher()
    for index, token in enumerate(tokens):
        if token not in allowed(matcher):
            return index
        assert token == END or matcher.advance([token])
    return None


@pytest.mark.parametrize("text", ['{"name": "Ada", "age": 36}', '{"name":"é","age":3}'])
def test_valid_document_is_allowed_and_then_only_its_end(text: str) -> None:
    grammar = VOCABULARY.compile(SCHEMA)
    tokens = tokens_of(text)
    assert first_refused(grammar, [*tokens, END]) is None
    matcher = grammar.matcher()
    assert matcher.advance(tokens[:-1])
    assert END not in allowed(matcher)
    assert not matcher.is_complete
    assert matcher.advance(tokens[-1:])
    assert allowed(matcher) == [END]
    assert matcher.is_complete


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ('{"name": 3', '{"name": '),
        ('{"age": 3', '{"'),
        ('{"name": "x", "age": 2}', '{"name": "x", "age": 2'),
        ('{"name": "x", "age": 3, "more"', '{"name": "x", "age": 3'),
        ("hello", ""),
    ],
)
def test_invalid_document_is_refused_at_its_first_wrong_token(text: str, start: str) -> None:
    tokens = tokens_of(text)
    refused = first_refused(VOCABULARY.compile(SCHEMA), tokens)
    assert refused is not None
    assert refused <= len(tokens_of(start))


def test_control_tokens_are_never_allowed_and_end_tokens_only_where_the_grammar_accepts() -> None:
    matcher = VOCABULARY.compile(StructuredOutputs("regex", "(.|\n)*")).matcher()
    special = set(TOKENIZER.token_bytes.special)
    assert special & {*allowed(matcher)} == {END}
    assert max(allowed(matcher)) < TOKENIZER.vocab_size
    assert not matcher.is_complete


def test_any_start_of_a_log_leads_to_the_same_masks() -> None:
    grammar, tokens = VOCABULARY.compile(SCHEMA), tokens_of('{"name": "Ada", "age": 36}')
    step_by_step = grammar.matcher()
    for index, token in enumerate(tokens):
        replayed = grammar.matcher()
        assert replayed.advance(tokens[:index])
        assert allowed(replayed) == allowed(step_by_step)
        assert step_by_step.advance([token])


def test_choices_with_quotes_and_any_characters_are_followed() -> None:
    options = ['say "hi"', "back\\slash", "line\nbreak", "é😀", "{x}", "tab\t"]
    grammar = VOCABULARY.compile(choice(options))
    for option in options:
        matcher = grammar.matcher()
        assert matcher.advance(tokens_of(option)), option
        assert END in allowed(matcher)
    assert first_refused(grammar, tokens_of("say no")) is not None


def test_structural_tag_constrains_only_what_follows_a_trigger() -> None:
    text = (
        '{"structures": [{"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"}],'
        ' "triggers": ["<f="]}'
    )
    grammar = VOCABULARY.compile(StructuredOutputs("structural_tag", text))
    assert first_refused(grammar, [*tokens_of("I think so. <f=add>12</f> Yes."), END]) is None
    assert first_refused(grammar, tokens_of("so <f=add>x")) is not None
    assert first_refused(grammar, tokens_of("so <f=sub>")) is not None


def test_log_that_the_grammar_does_not_allow_is_refused() -> None:
    grammar = VOCABULARY.compile(SCHEMA)
    grammar.check_answer(tokens_of('{"name"'))
    with pytest.raises(InvalidParameterError, match="grammar does not allow the"):
        grammar.check_answer(tokens_of("hello"))
    matcher = grammar.matcher()
    assert not matcher.advance(tokens_of("hello"))
    assert allowed(matcher) == []
    assert not matcher.is_complete


def test_masks_of_several_answers_are_those_of_each_alone() -> None:
    grammar, tokens = VOCABULARY.compile(SCHEMA), tokens_of('{"name": "Ada", "age": 36}')
    matchers = [grammar.matcher() for _ in tokens]
    for count, matcher in enumerate(matchers):
        assert matcher.advance(tokens[:count])
    together = np.full((len(tokens), num_words(VOCAB_SIZE) + 3), -1, np.int32)
    fill_masks(matchers, together)
    for words, matcher in zip(together, matchers, strict=True):
        alone = np.zeros(num_words(VOCAB_SIZE), np.int32)
        matcher.fill(alone)
        assert (words[: len(alone)] == alone).all()
        assert not words[len(alone) :].any()
    with pytest.raises(ValueError, match="words has 5 words per mask: expected at least"):
        fill_masks(matchers, together[:, :5].copy())


def test_model_without_end_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no end token"):
        GrammarVocabulary(TOKENIZER, VOCAB_SIZE, [])


def test_cache_compiles_a_constraint_once_and_drops_the_least_recently_used() -> None:
    made = []

    def vocabulary() -> GrammarVocabulary:
        made.append(VOCABULARY)
        return VOCABULARY

    cache = GrammarCache(vocabulary, max_bytes=300 << 10)
    first, second, third = (choice([name]) for name in ("a", "b", "c"))
    assert cache.find(first) is None
    assert cache.compile(first) is cache.compile(first)
    cache.compile(second)
    assert cache.find(first) is not None
    cache.compile(third)
    assert cache.find(second) is None
    assert cache.find(first) is not None
    assert (cache.num_compiled, len(made)) == (3, 1)


def test_memory_of_the_cache_stays_flat_over_many_schemas() -> None:
    """After the cache is full, a leak of 4 KiB in each of 2,000 schemas would be noticed."""
    cache = GrammarCache(lambda: VOCABULARY)
    words = np.full(num_words(VOCAB_SIZE), -1, np.int32)
    sizes = []
    for number in range(3000):
        if number in (0, 1000):
            sizes.append(resident_bytes())
        properties = {f"k{number}": {"type": "string", "maxLength": 5}}
        matcher = cache.compile(json_schema({"type": "object", "properties": properties})).matcher()
        matcher.fill(words)
    sizes.append(resident_bytes())
    empty, full, end = sizes
    assert full - empty < 2 * MAX_BYTES  # `grammar_bytes` is an estimate
    assert end - full < 8 << 20


def test_slices_change_no_mask() -> None:
    plain = LLTokenizer(TOKENIZER.tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=[END])
    schema = json_schema({"type": "string", "maxLength": 14})
    ours = VOCABULARY.compile(schema).matcher()
    theirs = Matcher(LLMatcher(plain, grammar_text(schema)), num_words(VOCAB_SIZE))
    for character in '"abc ü,日-012345':
        assert allowed(ours) == allowed(theirs)
        for token in tokens_of(character):
            assert ours.advance([token])
            assert theirs.advance([token])
    assert allowed(ours) == allowed(theirs) == tokens_of('"')


def test_masks_of_broken_matchers_allow_no_token() -> None:
    matchers = [VOCABULARY.compile(SCHEMA).matcher() for _ in range(2)]
    for matcher in matchers:
        assert not matcher.advance(tokens_of("x"))
    words = np.full((2, num_words(VOCAB_SIZE)), -1, np.int32)
    for executor in (None, LLExecutor(1)):
        fill_masks(matchers, words, executor)
        assert not words.any()


def random_masks(vocabularies: Sequence[GrammarVocabulary], wanted: StructuredOutputs) -> list[Any]:
    """Follow a random answer; return the tokens that each vocabulary allows at each position."""
    numbers, found = random.Random(3), list[Any]()
    matchers = [each.compile(wanted).matcher() for each in vocabularies]
    while len(found) < 60:
        found.append([allowed(each) for each in matchers])
        token = numbers.choice(found[-1][0])
        if matchers[0].is_complete or not all([each.advance([token]) for each in matchers]):
            break
    return found


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_masks_are_those_of_the_librarys_own_reading(tmp_path: Path, kind: str) -> None:
    written = write_folder(tmp_path / "model", KINDS[kind]())
    tokenizer = ModelTokenizer(written)
    ours = GrammarVocabulary(tokenizer, tokenizer.vocab_size, [END])
    theirs = GrammarVocabulary(tokenizer, tokenizer.vocab_size, [END])
    theirs.tokens = LLTokenizer(
        tokenizer.tokenizer.to_str(), n_vocab=tokenizer.vocab_size, eos_token=[END]
    )
    for schema in (SCHEMA, choice(["the quick brown fox", "the <quick> end", "\u65e5\u672c 12"])):
        masks = random_masks((ours, theirs), schema)
        assert len(masks) > 3
        for own, other in masks:
            # The library treats `<tool>`, an added token with ordinary text, as a control token.
            assert [
                each for each in own if tokenizer.token_bytes.bytes_of(each) != b"<tool>"
            ] == other


@pytest.mark.parametrize("side", ["", "lstrip", "rstrip"])
@pytest.mark.parametrize("kind", KINDS)
def test_forced_text_keeps_the_spaces_beside_an_added_token(
    tmp_path: Path, kind: str, side: str
) -> None:
    tokenizer = KINDS[kind]()
    flags = {side: True} if side else {}
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, **flags)])
    model = ModelTokenizer(write_folder(tmp_path / "model", tokenizer))
    vocabulary = GrammarVocabulary(model, model.vocab_size, [END])
    matcher = vocabulary.compile(StructuredOutputs("choice", '["a <tool_call> b"]')).matcher()
    tokens: list[int] = []
    while not matcher.is_complete:
        tokens.append(allowed(matcher)[0])
        assert matcher.advance(tokens[-1:])
    assert b"".join(map(model.token_bytes.bytes_of, tokens)) == b"a <tool_call> b"


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_that_are_text_are_allowed_in_text(tmp_path: Path, kind: str) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    text, control = (id_of(tokenizer, name) for name in ("<tool_call>", "<|im_end|>"))
    model = ModelTokenizer(write_folder(tmp_path / "model", tokenizer))
    vocabulary = GrammarVocabulary(model, model.vocab_size, [END])
    found = allowed(vocabulary.compile(StructuredOutputs("regex", "(.|\n)*")).matcher())
    assert text in found
    assert control not in found
    # If a grammar forces a text, the matcher allows the token that stands for this text.
    forced = vocabulary.compile(StructuredOutputs("choice", '["a<tool_call>b"]')).matcher()
    assert forced.advance(model.encode("a", add_special_tokens=False)[-1:])
    assert allowed(forced) == [text]


@pytest.mark.parametrize("kind", KINDS)
def test_end_tokens_that_are_not_special_are_no_text(tmp_path: Path, kind: str) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.add_tokens([AddedToken("<end_of_turn>", special=False)])
    end = id_of(tokenizer, "<end_of_turn>")
    model = ModelTokenizer(write_folder(tmp_path / "model", tokenizer))
    vocabulary = GrammarVocabulary(model, model.vocab_size, [END, end])
    # The regex requires at least one character, so the empty answer is not complete.
    found = allowed(vocabulary.compile(StructuredOutputs("regex", "(.|\n)+")).matcher())
    assert end not in found
