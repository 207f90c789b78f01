"""What a review dwells on: the families that the courses before it left weak."""

from __future__ import annotations

import torch

from training import ddp
from training.evaluate import Answer, score
from training.tasks import FAMILIES

_NUM_QUESTIONS = 48
# A family that is mastered keeps half of its weight: with a fifth, stories and products were lost.
_KEPT, _ADDED = 0.5, 2.0


def review_weights(answer: Answer | None) -> dict[str, float]:
    """The families' weights, raised by their share of wrong answers.

    Asked are questions from the training side: the held-out ones decide nothing. Only the first
    process of the crew has an `answer` to ask; the others get the weights from it.
    """
    weights = torch.zeros(len(FAMILIES))
    for index, family in enumerate(FAMILIES.values()):
        if answer is not None:
            wrong = 1 - score(answer, family, family.practice(_NUM_QUESTIONS)).fraction
            weights[index] = family.weight * (_KEPT + _ADDED * wrong)
    ddp.all_reduce_([weights])
    return dict(zip(FAMILIES, weights.tolist(), strict=True))
