"""Steps that are planned but not committed, and sequences removed during one of them."""

import numpy as np

from penstock.workers.scheduling.running_batch import RunningBatch
from penstock.workers.scheduling.sequence import Bools, Ints, StepPlan
from penstock.workers.scheduling.waiting import SequenceState


class InFlightSteps:
    """The steps in flight, oldest first: at most two, or one per pipeline stage.

    Their sequences keep rows and blocks until the commit.
    """

    def __init__(self, batch: RunningBatch) -> None:
        self.plans: list[StepPlan] = []
        self.released_later: list[SequenceState] = []  # removed while in a step in flight
        self._batch = batch

    def holds(self, ticket: SequenceState) -> bool:
        """Return True if the sequence is in a step in flight."""
        return any(
            (plan.rows == ticket.row).any() or (plan.forks[:, 1] == ticket.row).any()
            for plan in self.plans
        )

    def release_row(self, ticket: SequenceState) -> bool:
        """Release row and blocks now (True), or when no step in flight has it any more (False)."""
        if self.holds(ticket):
            self.released_later.append(ticket)
            return False
        self._batch.release_row(ticket)
        return True

    def still_held(self, rows: Ints) -> Bools:
        """Return a mask [n]: True for rows whose sequence was not dropped and has not ended."""
        return ~np.isin(rows, [ticket.row for ticket in self.released_later])

    def release_drained(self) -> None:
        """Release the removed sequences that are in no step in flight any more."""
        gone, self.released_later = self.released_later, []
        for ticket in gone:
            self.release_row(ticket)
