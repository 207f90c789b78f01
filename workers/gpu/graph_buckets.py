"""Graph buckets: which decode steps have a captured graph, and which graph a step takes. No torch.

A captured graph has a fixed number of rows and a fixed longest context. A step takes the smallest
graph that fits; its unused rows are padding. Steps that fit no graph (a prompt chunk among the
decodes, too many rows) run uncaptured.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.workers.scheduling.sequence import StepPlan

ROWS = (1, 2, 4, *range(8, 257, 8))
"""Rows of graphs. A step with more rows than the largest computes long enough to hide launches."""

FIRST_CONTEXT, CONTEXT_FACTOR = 8192, 8
"""Longest contexts of graphs: 8192 positions, then times 8, up to the model's maximum. If all of
them had the model's maximum, most programs of a step's attention grid would be idle."""


@dataclass(frozen=True, slots=True, order=True)
class GraphBucket:
    """Number of rows and longest context of a captured graph."""

    rows: int
    context: int  # longest context in positions, the new token included


class GraphBuckets:
    """The graph buckets of one engine."""

    def __init__(self, max_sequences: int, max_model_len: int) -> None:
        self.rows = _up_to(ROWS, min(max_sequences, ROWS[-1]))
        self.contexts = _up_to(_contexts(max_model_len), max_model_len)

    def buckets(self) -> list[GraphBucket]:
        """Return all buckets, largest first: smaller graphs then reuse memory of larger ones."""
        rungs = [GraphBucket(rows, context) for rows in self.rows for context in self.contexts]
        return sorted(rungs, reverse=True)

    def bucket_for(self, plan: StepPlan) -> GraphBucket | None:
        """Return the bucket that this step takes, or None if it must run uncaptured."""
        if len(plan.tokens) != len(plan.rows) or len(plan.scored):
            return None
        return self.smallest(len(plan.rows), int(plan.context_lens.max()))

    def smallest(self, num_rows: int, context: int) -> GraphBucket | None:
        """Return the smallest bucket that holds `num_rows` rows of this context, or None."""
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
