"""The evaluation counts correct answers to held-out examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from training import evaluate
from training.evaluate import Score
from training.tasks import FAMILIES, Conversation

COUNT = 12


def expected_answers(conversations: Sequence[Conversation]) -> list[str]:
    """Return the expected answer to each conversation."""
    answers = {
        str(example.conversation()): example.answer
        for family in FAMILIES.values()
        for example in family.held_out(COUNT)
    }
    return [answers[str(conversation)] for conversation in conversations]


@pytest.mark.slow
def test_expected_answers_score_one() -> None:
    scores = evaluate.measure(expected_answers, COUNT)
    assert [score.family for score in scores] == list(FAMILIES)
    assert all(score.fraction == 1.0 for score in scores)


def test_wrong_answers_score_zero() -> None:
    scores = evaluate.measure(
        lambda conversations: ["no"] * len(conversations), COUNT, families=["addition"]
    )
    assert scores == [Score("addition", 0, COUNT)]


def test_scores_round_trip_through_their_file(tmp_path: Path) -> None:
    scores = [Score("addition", 190, 200), Score("story", 3, 20)]
    evaluate.write_scores(scores, tmp_path)
    assert evaluate.read_scores(tmp_path) == scores
    assert json.loads((tmp_path / "held_out.json").read_text())["addition"]["right"] == 190


def test_a_family_is_claimed_from_a_score_of_90_percent() -> None:
    assert Score("addition", 180, 200).is_claimed
    assert not Score("addition", 179, 200).is_claimed
