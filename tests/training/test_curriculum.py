"""The second training stage gives weak question families more weight than mastered families."""

from __future__ import annotations

from collections.abc import Sequence

from training import curriculum
from training.tasks import FAMILIES, Conversation

UNAIDED = {name: family for name, family in FAMILIES.items() if not family.tools}


def answers_of(known: str, conversations: Sequence[Conversation]) -> list[str]:
    """Return correct answers to questions of family `known`, and "no" to other questions."""
    answers = {str(e.conversation()): e.answer for e in FAMILIES[known].practice(48)}
    return [answers.get(str(conversation), "no") for conversation in conversations]


def test_weak_families_weigh_more_than_mastered_ones() -> None:
    weights = curriculum.review_weights(lambda conversations: answers_of("addition", conversations))
    assert set(weights) == set(UNAIDED)
    base = {name: family.weight for name, family in UNAIDED.items()}
    assert 0 < weights["addition"] < base["addition"]
    assert all(weights[name] > base[name] for name in UNAIDED if name != "addition")


def test_review_weights_are_zero_in_a_process_without_a_model() -> None:
    assert set(curriculum.review_weights(None).values()) == {0.0}


def test_practice_examples_are_never_held_out() -> None:
    for family in FAMILIES.values():
        assert not any(family.is_held_out(example) for example in family.practice(20))
