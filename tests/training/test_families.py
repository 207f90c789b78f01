"""The families: seeded, split without overlap, and judged by their own checkers."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from training.families import FAMILIES, Example, Family
from training.families.base import exact

by_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@by_family
def test_held_out_examples_are_the_same_for_the_same_seed(family: Family) -> None:
    assert family.held_out(20, seed=3) == family.held_out(20, seed=3)


@by_family
def test_held_out_examples_differ_between_seeds(family: Family) -> None:
    assert family.held_out(5, seed=1) != family.held_out(5, seed=2)


@by_family
def test_held_out_questions_are_different_ones(family: Family) -> None:
    questions = [(example.history, example.prompt) for example in family.held_out(50)]
    assert len(questions) == len(set(questions)) >= 20


@by_family
def test_training_never_sees_a_held_out_question(family: Family) -> None:
    rng = Random(0)
    trained = [family.training_example(rng) for _ in range(400)]
    held_out = family.held_out(100)
    assert not {e.key or e.prompt for e in trained} & {e.key or e.prompt for e in held_out}


@by_family
def test_expected_answers_are_accepted_and_others_are_not(family: Family) -> None:
    for example in family.held_out(30):
        assert family.accepts(example, example.answer)
        assert not family.accepts(example, example.answer + " And more.")
        assert not family.accepts(example, "")


@by_family
def test_every_family_says_what_it_asks(family: Family) -> None:
    assert family.about.endswith(".")


def test_exact_ignores_surrounding_space_only() -> None:
    example = Example("What is 1 + 1?", "1 + 1 = 2")
    assert exact(example, " 1 + 1 = 2\n")
    assert not exact(example, "1 + 1 =  2")


@pytest.mark.parametrize(("old", "new"), [("{hero}", "Nobody"), ("friends", "enemies")])
def test_a_story_that_leaves_the_grammar_is_refused(old: str, new: str) -> None:
    family = FAMILIES["story"]
    example = next(e for e in family.held_out(50) if "best of friends" in e.answer)
    hero = example.key.split()[1]
    wrong = example.answer.replace(old.format(hero=hero), new)
    assert not family.accepts(example, wrong)


def test_a_story_about_another_hero_is_refused() -> None:
    family = FAMILIES["story"]
    first, second = family.held_out(2)
    assert not family.accepts(replace(first, answer=second.answer), second.answer)


def test_a_story_keeps_to_the_thing_that_was_found() -> None:
    family = FAMILIES["story"]
    example = next(e for e in family.held_out(80) if "found a map" in e.answer)
    assert not family.accepts(example, example.answer.replace("found a map", "found a bell"))


def test_history_comes_first_in_the_messages() -> None:
    example = Example("What is my name?", "Your name is Ada.", history=(("I am Ada.", "Hello!"),))
    assert [m["role"] for m in example.messages()] == ["user", "assistant", "user"]
    assert example.messages()[-1]["content"] == "What is my name?"
