"""Which decode steps have a captured graph, and which graph a step takes. Free of torch.

A captured graph always computes so many rows, and its attention looks at so many positions at most.
A step takes the least graph that holds it; the rows that it lacks are padding. What no graph holds
(a prompt's chunk among the decodes, more rows than the largest has) runs uncaptured.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.workers.scheduling.sequence import StepPlan

ROWS = (1, 2, 4, *range(8, 257, 8))
"""Of graphs. Beyond the largest a step computes long enough to hide its launches."""

FIRST_CONTEXT, CONTEXT_FACTOR = 8192, 8
"""Positions: an attention grid for the longest context of a long model is mostly idle blocks."""


@dataclass(frozen=True, slots=True, order=True)
class GraphBucket:
    """One captured graph."""

    rows: int
    context: int  # positions that a row can have, its new one included


class GraphBuckets:
    """The graphs of one engine."""

    def __init__(self, max_sequences: int, max_model_len: int) -> None:
        self.rows = _up_to(ROWS, min(max_sequences, ROWS[-1]))
        self.contexts = _up_to(_contexts(max_model_len), max_model_len)

    def buckets(self) -> list[GraphBucket]:
        """All of them, the largest first: the smaller ones then fit into its memory."""
        rungs = [GraphBucket(rows, context) for rows in self.rows for context in self.contexts]
        return sorted(rungs, reverse=True)

    def bucket_for(self, plan: StepPlan) -> GraphBucket | None:
        """The graph that this step takes; None: it runs uncaptured."""
        if len(plan.tokens) != len(plan.rows) or len(plan.scored):
            return None
        return self.smallest(len(plan.rows), int(plan.context_lens.max()))

    def smallest(self, num_rows: int, context: int) -> GraphBucket | None:
        """The least graph that holds so many rows of at most that context; None: there is none."""
        rows, contexts = bisect_left(self.rows, num_rows), bisect_left(self.contexts, context)
        if rows == len(self.rows) or contexts == len(self.contexts):
            return None
        return GraphBucket(self.rows[rows], self.contexts[contexts])


def _contexts(longest: int) -> Iterable[int]:
    context = FIRST_CONTEXT
    while context < longest:
        yield context
        context *= CONTEXT_FACTOR


def _up_to(steps: Iterable[int], most: int) -> tuple[int, ...]:
    return (*(step for step in steps if step < most), most)
