"""Log probabilities of prompt tokens."""

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from penstock.workers.sampling.sampler import PromptLogprobs, Sampler, TokenLogprobs
from penstock.workers.scheduling.sequence import StepPlan
from penstock.workers.scheduling.table import SequenceTable


def score_prompts(
    plan: StepPlan, slices: Iterable[Tensor], sampler: Sampler, table: SequenceTable
) -> list[PromptLogprobs]:
    """Return the logprobs of the plan's scored prompt tokens, one entry per sequence.

    Args:
        plan: plan of the step.
        slices: logits of the P tokens `plan.scored`, in slices [n, V] of consecutive tokens.
        sampler: has the parameters of the rows of the sequence table.
        table: the sequence table.
    """
    positions = plan.positions[plan.scored] + 1
    at = np.searchsorted(plan.query_starts, plan.scored, side="right") - 1
    rows, starts = np.unique(plan.rows[at], return_index=True)
    order = np.argsort(starts)
    rows, starts = rows[order], starts[order]
    ends = [*starts[1:].tolist(), len(plan.scored)]
    wanted = sampler.num_prompt_logprobs(plan.rows[at])
    tokens = table.tokens[plan.rows[at], positions]
    entries: list[TokenLogprobs | None] = []
    for logits in slices:
        part = slice(len(entries), len(entries) + len(logits))
        entries += sampler.score(logits, wanted[part], tokens[part])
    return [
        PromptLogprobs(key, int(positions[start]), entries[start:end])
        for key, start, end in zip(table.keys[rows].tolist(), starts.tolist(), ends, strict=True)
    ]
