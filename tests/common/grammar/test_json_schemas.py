"""Random schemas: an answer that can end is valid, and an invalid document cannot end."""

import json
import random
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from penstock.common.grammar.matcher import GrammarVocabulary, num_words
from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.structured_outputs import json_schema
from penstock.common.text.tokenizer import ModelTokenizer
from tests.support.json_schemas import SCHEMAS

TOKENIZER = ModelTokenizer(Path(__file__).parents[3] / "penstock" / "models" / "demo")
END = 2
VOCABULARY = GrammarVocabulary(TOKENIZER, TOKENIZER.vocab_size, [END])
MAX_TOKENS = 400

RELAXED = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def is_date(value: object) -> bool:
    """Check a date like `llguidance`, which allows the year 0000 and any February 29."""
    if isinstance(value, str):
        year, separator, day = value.partition("-")
        checked_year = "2000" if year == "0000" or day == "02-29" else year
        date.fromisoformat(checked_year + separator + day)
    return True


CHECKER = jsonschema.FormatChecker(("uuid", "ipv4"))
CHECKER.checks("date", raises=ValueError)(is_date)


def valid(document: Any, schema: dict[str, Any]) -> bool:
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    return bool(validator.is_valid(document))


def random_answer(schema: dict[str, Any], seed: int) -> str | None:
    """Draw allowed tokens until the end token; return the text, or None if it does not end."""
    matcher = VOCABULARY.compile(json_schema(schema)).matcher()
    numbers, tokens = random.Random(seed), list[int]()
    words = np.zeros(num_words(TOKENIZER.vocab_size), np.int32)
    while len(tokens) < MAX_TOKENS:
        matcher.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        assert allowed, "no token is allowed"
        token = END if END in allowed else numbers.choice(allowed)
        if token == END:
            return TOKENIZER.token_bytes.decode(tokens)
        assert matcher.advance([token])
        tokens.append(token)
    return None


@RELAXED
@given(schema=SCHEMAS, seed=st.integers(0, 99))
@example(schema={"type": "number", "minimum": 5, "maximum": 8}, seed=0)
@example(schema={"type": "string", "format": "date"}, seed=0)
def test_answer_that_ends_by_itself_is_valid(schema: dict[str, Any], seed: int) -> None:
    try:
        text = random_answer(schema, seed)
    except InvalidParameterError as error:
        if "Unsatisfiable" not in str(error):
            raise
        return
    if text is not None:
        assert valid(json.loads(text), schema), text


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=5) | st.just(0.5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("a", "id", "name", "x y", "?")), inner, max_size=3)
    ),
    max_leaves=6,
)


@RELAXED
@given(schema=SCHEMAS, document=DOCUMENTS)
def test_invalid_document_never_reaches_its_end(schema: dict[str, Any], document: Any) -> None:
    assume(not valid(document, schema))
    try:
        grammar = VOCABULARY.compile(json_schema(schema))
    except InvalidParameterError:
        assume(False)
    matcher = grammar.matcher()
    text = json.dumps(document, ensure_ascii=False)
    words = np.zeros(num_words(TOKENIZER.vocab_size), np.int32)
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if not matcher.advance([token]):
            return
    matcher.fill(words)
    assert not words[END // 32] >> END % 32 & 1, text


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [("2024-02-29", True), ("2023-02-29", True), ("0000-01-01", True), ("2023-02-30", False)],
)
def test_dates_are_those_that_the_docs_name(text: str, is_allowed: bool) -> None:
    matcher = VOCABULARY.compile(json_schema({"type": "string", "format": "date"})).matcher()
    tokens = TOKENIZER.encode(json.dumps(text), add_special_tokens=False)
    assert all(matcher.advance([token]) for token in tokens) == is_allowed


@pytest.mark.parametrize("seed", range(3))
def test_schema_that_cannot_be_met_is_refused_or_never_ends(seed: int) -> None:
    with pytest.raises(InvalidParameterError, match="Unsatisfiable"):
        random_answer({"type": "string", "minLength": 5, "maxLength": 2}, seed)
