"""The amount of work in a step: the numbers that determine how long the step takes."""

from typing import NamedTuple

import numpy as np

from penstock.workers.scheduling.sequence import StepPlan


class StepWork(NamedTuple):
    """The work of one step.

    Attributes:
        tokens: number of tokens that the model processes.
        sequences: number of sequences.
        positions: number of KV positions of all sequences, including those that the step writes.
        pairs: attention work of prompts: number of (prompt token, attended position) pairs. Covers
            only sequences that compute more than one token.
    """

    tokens: int
    sequences: int
    positions: int
    pairs: float


def step_work(plan: StepPlan) -> StepWork:
    """Return the work of a step."""
    contexts = plan.context_lens
    tokens, sequences, pairs = len(plan.tokens), len(contexts), 0.0
    if tokens > sequences:
        sizes = plan.query_starts[1:] - plan.query_starts[:-1]
        (long,) = (sizes > 1).nonzero()  # for few rows, a Python loop is faster than numpy
        for size, context in zip(sizes[long].tolist(), contexts[long].tolist(), strict=True):
            pairs += size * (context - size / 2)
    return StepWork(tokens, sequences, int(contexts.sum(dtype=np.int64)), pairs)
