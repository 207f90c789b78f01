"""Beam groups: the beams of the beam searches in the batch, grouped by search."""

import numpy as np

from penstock.workers.scheduling.block_growth import BlockGrowth
from penstock.workers.scheduling.kv_pool import BlockPool, State
from penstock.workers.scheduling.sequence import NEVER, BeamRows, Ints
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import SequencePhase, SequenceState


class BeamGroups:
    """The beams that have table rows, grouped by beam search.

    All beams of a search sample in the same steps. At the commit of a step, they exchange tokens
    and blocks, because a beam may continue any other beam of its search.
    """

    def __init__(self, table: SequenceTable, pool: BlockPool, growth: BlockGrowth) -> None:
        self._table = table
        self._pool = pool
        self._growth = growth
        self._groups: list[list[SequenceState]] = []  # the beams of each search, leader first

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, beams: list[SequenceState]) -> None:
        self._groups.append(beams)

    def remove(self, beams: list[SequenceState]) -> None:
        """Remove a search; ignore a search that has been removed already."""
        self._groups = [each for each in self._groups if each is not beams]

    def started(self, beams: list[SequenceState]) -> None:
        """Prepare the rows of a search whose prompt is computed: stop publishing their blocks."""
        # Beams exchange blocks, so the blocks of their answers are never published.
        self._table.num_published[[one.row for one in beams]] = NEVER

    def align(self, rows: Ints, remaining: Ints, counts: Ints) -> None:
        """Lower `counts` so that in this step all beams of a search sample a token, or none does.

        Args:
            rows: [n] rows of running sequences.
            remaining: [n] number of uncomputed tokens of each row.
            counts: [n] number of tokens that the step computes for each row; changed in place.
        """
        for beams in self._groups:
            leader = beams[0]
            if leader.forks and len(leader.tokens) == leader.new.num_prompt:
                # all beams sample their first token together, from the logits of the leader
                continue
            running = [one.row for one in beams if one.phase is SequencePhase.RUNNING]
            ours = np.isin(rows, running)
            if leader.forks or (remaining[ours] > 1).any():
                counts[ours] = np.minimum(counts[ours], remaining[ours] - 1)

    def reorder(self, beams: BeamRows, drawing: Ints) -> None:
        """Give all beams at the same time the tokens and blocks of their parents.

        All beams of a search have the same length. Blocks stay shared until a row writes to them.

        Args:
            beams: the beams of a step.
            drawing: [n] rows that get a token in this step; beams in other rows are ignored.
        """
        moved = (beams.rows != beams.parents) & np.isin(beams.rows, drawing)
        if not moved.any():
            return
        rows, parents, table = beams.rows[moved], beams.parents[moved], self._table
        counts = table.num_blocks[parents]
        old, new = (table.block_table[each, : int(counts.max())] for each in (rows, parents))
        others = (old != new) & (np.arange(old.shape[1]) < counts[:, None])
        for blocks, differ in zip(new, others, strict=True):
            self._pool.retain(blocks[differ], State.USED)
        for blocks, differ in zip(old, others, strict=True):
            self._pool.release(blocks[differ], State.USED)
        table.copy_rows(rows, parents)
        self._growth.shared_rows.update(rows.tolist(), parents.tolist())
