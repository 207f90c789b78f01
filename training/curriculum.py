"""Computes how much weight each question family gets when the model is trained further.

A family gets more weight if the model still answers many of its questions wrongly.
"""

from __future__ import annotations

import torch

from training import ddp
from training.evaluate import Answer, score
from training.tasks import FAMILIES

_NUM_QUESTIONS = 48
# A family without wrong answers keeps half of its weight.
# When such families kept only a fifth of their weight, the models got worse at the question
# families about stories and multiplication.
_KEPT, _ADDED = 0.5, 2.0


def review_weights(answer: Answer | None) -> dict[str, float]:
    """Return the weight of each question family. More wrong answers give a larger weight.

    Families with tools are left out, because a separate training stage covers them. The model
    answers training questions only, so that held-out questions do not influence the training.

    Args:
        answer: answers conversations with the model on rank 0, and None on the other ranks. These
            get the weights through an all-reduce.
    """
    families = [family for family in FAMILIES.values() if not family.tools]
    weights = torch.zeros(len(families))
    for index, family in enumerate(families):
        if answer is not None:
            wrong = 1 - score(answer, family, family.practice(_NUM_QUESTIONS)).fraction
            weights[index] = family.weight * (_KEPT + _ADDED * wrong)
    ddp.all_reduce_([weights])
    return dict(zip((family.name for family in families), weights.tolist(), strict=True))
