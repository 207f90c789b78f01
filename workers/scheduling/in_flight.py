"""The steps that are planned and not committed, and who has left while in one of them."""

import numpy as np

from penstock.workers.scheduling.running_batch import RunningBatch
from penstock.workers.scheduling.sequence import Bools, Ints, StepPlan
from penstock.workers.scheduling.waiting import SequenceState


class InFlightSteps:
    """Two steps at most, in order. What they work on keeps its row and blocks until they end."""

    def __init__(self, batch: RunningBatch) -> None:
        self.plans: list[StepPlan] = []
        self.released_later: list[SequenceState] = []  # dropped or ended, but in a step in flight
        self._batch = batch

    def holds(self, ticket: SequenceState) -> bool:
        """Whether a step in flight works on it."""
        return any(
            (plan.rows == ticket.row).any() or (plan.forks[:, 1] == ticket.row).any()
            for plan in self.plans
        )

    def release_row(self, ticket: SequenceState) -> bool:
        """Give up its row and blocks now, True, or once the last step that it is in has ended."""
        if self.holds(ticket):
            self.released_later.append(ticket)
            return False
        self._batch.release_row(ticket)
        return True

    def still_held(self, rows: Ints) -> Bools:
        """[n] whose of these rows have not been given up."""
        return ~np.isin(rows, [ticket.row for ticket in self.released_later])

    def release_drained(self) -> None:
        """Let those leave who are in no step any more."""
        gone, self.released_later = self.released_later, []
        for ticket in gone:
            self.release_row(ticket)
