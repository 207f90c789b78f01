"""Steps that are planned but not committed, and sequences removed while such steps have them."""

import numpy as np

from penstock.workers.scheduling.running_batch import RunningBatch
from penstock.workers.scheduling.sequence import NO_TOKENS, Bools, Ints, StepPlan
from penstock.workers.scheduling.waiting import SequenceState


class InFlightSteps:
    """The steps in flight, oldest first: at most two, or one per pipeline stage.

    Until a step commits, its sequences keep their table rows and blocks, and the source blocks of
    its copies stay held.
    """

    def __init__(self, batch: RunningBatch) -> None:
        self.plans: list[StepPlan] = []
        # sequences that were removed, but are still in a step in flight
        self.released_later: list[SequenceState] = []
        self._batch = batch

    @property
    def rows(self) -> Ints:
        """The table rows of all steps in flight, without forks."""
        return np.concatenate([NO_TOKENS, *(plan.rows for plan in self.plans)])

    def remove_oldest(self, plan: StepPlan) -> None:
        """Remove a step that has been computed. Raises ValueError if it is not the oldest."""
        if not self.plans or plan is not self.plans[0]:
            raise ValueError(
                f"step {plan.number} is not the oldest of {len(self.plans)} steps in flight"
            )
        del self.plans[0]
        if len(plan.copies):
            self._batch.block_growth.release_sources(plan.copies)

    def remove_newest(self, plan: StepPlan) -> None:
        """Remove a step that has not started to run. Raises ValueError if it is not the newest."""
        if not self.plans or plan is not self.plans[-1]:
            raise ValueError(
                f"step {plan.number} is not the newest of {len(self.plans)} steps in flight"
            )
        if len(plan.copies):
            raise ValueError(f"step {plan.number} copies blocks, so it cannot be withdrawn")
        self.plans.pop()

    def holds(self, ticket: SequenceState) -> bool:
        """Return True if the sequence is in a step in flight."""
        return any(
            (plan.rows == ticket.row).any() or (plan.forks[:, 1] == ticket.row).any()
            for plan in self.plans
        )

    def release_row(self, ticket: SequenceState) -> bool:
        """Release a sequence's row and blocks now, or later if a step in flight has the sequence.

        Return True if they were released now.
        """
        if self.holds(ticket):
            self.released_later.append(ticket)
            return False
        self._batch.release_row(ticket)
        return True

    def still_held(self, rows: Ints) -> Bools:
        """Return a mask [n] of `rows`: False if the sequence was removed but not yet released."""
        return ~np.isin(rows, [ticket.row for ticket in self.released_later])

    def release_drained(self) -> None:
        """Release the removed sequences that are no longer in a step in flight."""
        gone, self.released_later = self.released_later, []
        for ticket in gone:
            self.release_row(ticket)
