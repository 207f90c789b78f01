"""The steps that are planned and not committed, and who has left while in one of them."""

import numpy as np

from penstock.workers.scheduling.seats import Seats
from penstock.workers.scheduling.sequence import Bools, Ints, StepPlan
from penstock.workers.scheduling.waiting import Ticket


class Flight:
    """Two steps at most, in order. What they work on keeps its row and blocks until they end."""

    def __init__(self, seats: Seats) -> None:
        self.plans: list[StepPlan] = []
        self.gone: list[Ticket] = []  # dropped or ended, but in a step in flight
        self._seats = seats

    def holds(self, ticket: Ticket) -> bool:
        """Whether a step in flight works on it."""
        return any(
            (plan.rows == ticket.row).any() or (plan.forks[:, 1] == ticket.row).any()
            for plan in self.plans
        )

    def leave(self, ticket: Ticket) -> bool:
        """Give up its row and blocks now, True, or once the last step that it is in has ended."""
        if self.holds(ticket):
            self.gone.append(ticket)
            return False
        self._seats.leave(ticket)
        return True

    def stay(self, rows: Ints) -> Bools:
        """[n] whose of these rows have not been given up."""
        return ~np.isin(rows, [ticket.row for ticket in self.gone])

    def release(self) -> None:
        """Let those leave who are in no step any more."""
        gone, self.gone = self.gone, []
        for ticket in gone:
            self.leave(ticket)
