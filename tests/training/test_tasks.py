"""Question families: seeded examples, disjoint training and held-out sets, answer checks."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from training.tasks import FAMILIES, Example, Task
from training.tasks.arithmetic import is_held_out
from training.tasks.base import exact

by_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
by_drilled = pytest.mark.parametrize(
    "family", [family for family in FAMILIES.values() if family.drill], ids=lambda f: f.name
)


@by_family
def test_held_out_examples_are_the_same_for_the_same_seed(family: Task) -> None:
    assert family.held_out(20, seed=3) == family.held_out(20, seed=3)


@by_family
def test_held_out_examples_differ_between_seeds(family: Task) -> None:
    assert family.held_out(5, seed=1) != family.held_out(5, seed=2)


@by_family
def test_held_out_questions_are_distinct(family: Task) -> None:
    questions = [(example.history, example.prompt) for example in family.held_out(50)]
    assert len(questions) == len(set(questions)) >= 20


@by_family
def test_training_never_sees_a_held_out_question(family: Task) -> None:
    rng = Random(0)
    trained = [family.training_example(rng) for _ in range(400)]
    held_out = family.held_out(100)
    assert not {e.key or e.prompt for e in trained} & {e.key or e.prompt for e in held_out}


@by_family
def test_expected_answers_are_accepted_and_others_are_not(family: Task) -> None:
    for example in family.held_out(30):
        assert family.accepts(example, example.answer)
        assert not family.accepts(example, example.answer + " And more.")
        assert not family.accepts(example, "")


@by_family
def test_every_family_has_a_description(family: Task) -> None:
    assert family.about.endswith(".")


@by_drilled
def test_a_drill_omits_held_out_examples_only(family: Task) -> None:
    assert family.drill
    left_out = 0
    for seed in range(60):
        drilled = family.drill(Random(seed))
        kept = [example for example in drilled if not family.is_held_out(example)]
        left_out += len(drilled) - len(kept)
        if kept:
            turns = family.training_examples(Random(seed))
            assert [turn.key for turn in turns] == [example.key for example in kept]
            assert [turn.answer for turn in turns] == [example.answer for example in kept]
    assert left_out > 0


@by_drilled
def test_a_drill_states_its_text_only_once(family: Task) -> None:
    first, *others = max((family.training_examples(Random(seed)) for seed in range(9)), key=len)
    assert others
    assert all(0 < len(turn.prompt) < len(first.prompt) - 20 for turn in others)


@by_drilled
def test_problems_of_a_drill_are_also_valid_on_their_own(family: Task) -> None:
    assert family.drill
    for example in family.drill(Random(0)):
        assert example.key
        assert family.accepts(example, example.answer)
        assert not example.history


def test_families_about_recall_hold_out_the_same_facts() -> None:
    recall, recall_long = FAMILIES["recall"], FAMILIES["recall_long"]
    rng = Random(0)
    trained = [example for _ in range(40) for example in recall_long.training_examples(rng)]
    assert not any(recall.is_held_out(example) for example in trained)
    assert all(recall.is_held_out(example) for example in recall_long.held_out(40))


@pytest.mark.parametrize("name", ["addition", "subtraction", "addition_large"])
def test_held_out_sums_are_those_of_the_families(name: str) -> None:
    for example in FAMILIES[name].held_out(40):
        a, sign, b, *_ = example.answer.split()
        assert is_held_out(int(a), sign, int(b))
    rng = Random(1)
    for _ in range(40):
        a, sign, b, *_ = FAMILIES[name].training_example(rng).answer.split()
        assert not is_held_out(int(a), sign, int(b))
    others = ((500, "-", 300), (3, "-", 5), (5000, "+", 1))
    assert not any(is_held_out(*each) for each in others), "no family has these"


def test_json_extraction_key_has_the_fields_and_text_of_the_prompt() -> None:
    family = FAMILIES["json_extraction"]
    for example in family.held_out(20):
        fields, _, text = example.key.partition(": ")
        assert fields in example.prompt
        assert f'"{text}"' in example.prompt


def test_exact_ignores_surrounding_space_only() -> None:
    example = Example("What is 1 + 1?", "1 + 1 = 2")
    assert exact(example, " 1 + 1 = 2\n")
    assert not exact(example, "1 + 1 =  2")


@pytest.mark.parametrize(("old", "new"), [("{hero}", "Nobody"), ("friends", "enemies")])
def test_a_story_that_breaks_the_grammar_is_refused(old: str, new: str) -> None:
    family = FAMILIES["story"]
    example = next(e for e in family.held_out(50) if "best of friends" in e.answer)
    hero = example.key.split()[1]
    wrong = example.answer.replace(old.format(hero=hero), new)
    assert not family.accepts(example, wrong)


def test_a_story_about_another_hero_is_refused() -> None:
    family = FAMILIES["story"]
    first, second = family.held_out(2)
    assert not family.accepts(replace(first, answer=second.answer), second.answer)


def test_a_story_with_another_found_object_is_refused() -> None:
    family = FAMILIES["story"]
    example = next(e for e in family.held_out(80) if "found a map" in e.answer)
    assert not family.accepts(example, example.answer.replace("found a map", "found a bell"))


def test_history_comes_first_in_the_messages() -> None:
    example = Example("What is my name?", "Your name is Ada.", history=(("I am Ada.", "Hello!"),))
    assert [m["role"] for m in example.messages()] == ["user", "assistant", "user"]
    assert example.messages()[-1]["content"] == "What is my name?"
