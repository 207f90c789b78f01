"""Graph buckets: the sizes for which decode steps are captured. This module does not import torch.

A captured graph has a fixed number of rows (one per sequence). A step runs with the smallest graph
that fits; the graph's unused rows are padding. A step that fits no graph (because of a prompt
chunk, or too many rows) runs uncaptured.

Our own attention and FlashInfer read the context lengths of each step from buffers, so one graph
serves all context lengths. The launch grids of FlashAttention-3 grow with the longest context for
which a graph is captured. With this backend, graphs are captured for several longest contexts.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.workers.scheduling.sequence import StepPlan

ROWS = (1, 2, 4, *range(8, 257, 8))
"""Numbers of rows of graphs. Steps with more rows take so long that launch times are hidden."""

FIRST_CONTEXT, CONTEXT_FACTOR = 8192, 8
"""Longest contexts for which graphs are captured: 8192 positions, then 8 times the previous one,
up to the model's maximum."""


@dataclass(frozen=True, slots=True, order=True)
class GraphBucket:
    """Number of rows and longest context of a captured graph."""

    rows: int
    context: int  # longest context in positions, including the new token


class GraphBuckets:
    """The graph buckets of one engine."""

    def __init__(
        self, max_sequences: int, max_model_len: int, several_contexts: bool = False
    ) -> None:
        """Choose the sizes of graphs.

        `several_contexts`: capture graphs for several values of the longest context.
        """
        contexts = _contexts(max_model_len) if several_contexts else ()
        self.rows = _up_to(ROWS, min(max_sequences, ROWS[-1]))
        self.contexts = _up_to(contexts, max_model_len)

    def buckets(self) -> list[GraphBucket]:
        """Return all buckets, largest first: smaller graphs then reuse memory of larger graphs."""
        rungs = [GraphBucket(rows, context) for rows in self.rows for context in self.contexts]
        return sorted(rungs, reverse=True)

    def bucket_for(self, plan: StepPlan) -> GraphBucket | None:
        """Return the bucket for a step, or None if the step must run uncaptured."""
        if len(plan.tokens) != len(plan.rows) or len(plan.scored):
            return None
        return self.smallest(len(plan.rows), int(plan.context_lens.max()))

    def smallest(self, num_rows: int, context: int) -> GraphBucket | None:
        """Return the smallest bucket for `num_rows` rows of up to `context` positions, or None."""
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
