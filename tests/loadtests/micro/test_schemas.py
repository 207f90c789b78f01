"""The check of structured outputs with random schemas finds wrong masks and accepts right ones."""

import json
from typing import Any

import pytest

from penstock.common.grammar.matcher import GrammarVocabulary
from penstock.common.structured_outputs import StructuredOutputs, json_schema
from penstock.loadtests.micro import schemas
from penstock.loadtests.micro.schemas import KEYWORDS, Checker, draw, main, mistake, with_value


def test_random_schemas_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schemas", "60"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["schemas"], figures["failed"]) == (60, 0)
    assert figures["ended"] > 50


def test_all_keywords_are_drawn_and_no_others() -> None:
    seen: set[str] = set()

    def collect(schema: dict[str, Any]) -> None:
        seen.update(schema)
        for each in (*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()):
            collect(each)
        for each in (*schema.get("anyOf", ()), *filter(None, [schema.get("items")])):
            collect(each)

    for seed in range(100):
        collect(draw(seed)[0])
    assert seen == set(KEYWORDS)


def test_wrong_values_and_names_are_found_in_the_text() -> None:
    document = {"a": [1, {"b": "x"}], "c": 2}
    text, end = with_value(document, ("a", 1, "b"), False)
    assert text == '{"a": [1, {"b": false}], "c": 2}'
    assert text[:end].endswith("false")
    for seed in range(50):
        _, valid, drawn = draw(seed)
        text, end = mistake(valid, drawn)
        assert json.loads(text) != valid
        assert 0 < end <= len(text)


@pytest.mark.parametrize("lost", ["pattern", "maximum", "additionalProperties", "maxLength"])
def test_a_keyword_without_effect_is_found(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(each) for key, each in value.items() if key != lost}
        return [without(each) for each in value] if isinstance(value, list) else value

    def weaker(schema: Any) -> StructuredOutputs:
        return json_schema(without(schema))

    monkeypatch.setattr(schemas, "json_schema", weaker)
    checker = Checker(max_tokens=300)
    assert isinstance(checker.vocabulary, GrammarVocabulary)
    found = [line for seed in range(60) for line in checker.failures(seed) if line]
    assert any("the token masks" in line for line in found)
