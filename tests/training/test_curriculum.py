"""The second course dwells on what the first left weak, and lets nothing go."""

from __future__ import annotations

from collections.abc import Sequence

from training import curriculum
from training.tasks import FAMILIES, Message


def answer_to(known: str, conversations: Sequence[list[Message]]) -> list[str]:
    """Right answers to the family `known`, and none to the others."""
    book = {str(e.messages()): e.answer for e in FAMILIES[known].practice(48)}
    return [book.get(str(conversation), "no") for conversation in conversations]


def test_weak_families_weigh_more_than_mastered_ones() -> None:
    weights = curriculum.review_weights(lambda asked: answer_to("addition", asked))
    assert set(weights) == set(FAMILIES)
    own = {name: family.weight for name, family in FAMILIES.items()}
    assert 0 < weights["addition"] < own["addition"]
    assert all(weights[name] > own[name] for name in FAMILIES if name != "addition")


def test_a_process_without_a_model_adds_nothing() -> None:
    assert set(curriculum.review_weights(None).values()) == {0.0}


def test_practice_is_never_held_out() -> None:
    for family in FAMILIES.values():
        assert not any(family.is_held_out(example) for example in family.practice(20))
