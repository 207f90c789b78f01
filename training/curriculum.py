"""Family weights of a review: more of the families that earlier courses left weak."""

from __future__ import annotations

import torch

from training import ddp
from training.evaluate import Answer, score
from training.tasks import FAMILIES

_NUM_QUESTIONS = 48
# A mastered family keeps half of its weight: with a fifth, the models forgot stories and products.
_KEPT, _ADDED = 0.5, 2.0


def review_weights(answer: Answer | None) -> dict[str, float]:
    """Return the family weights, raised by each family's share of wrong answers.

    The questions come from the training side; held-out questions do not influence training. Only
    rank
    0 has an `answer`; the other ranks get the weights from it through an all-reduce.
    """
    weights = torch.zeros(len(FAMILIES))
    for index, family in enumerate(FAMILIES.values()):
        if answer is not None:
            wrong = 1 - score(answer, family, family.practice(_NUM_QUESTIONS)).fraction
            weights[index] = family.weight * (_KEPT + _ADDED * wrong)
    ddp.all_reduce_([weights])
    return dict(zip(FAMILIES, weights.tolist(), strict=True))
