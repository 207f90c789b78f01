"""Several steps at once: those in which nothing is decided, for who plays a worker in virtual time.

Nobody comes, ends, yields or loses blocks in them: where the batcher stands after them follows from
where it stood before. `Steady` knows the steps, this knows who else could have a say.
"""

from dataclasses import dataclass

from penstock.workers.scheduling.flight import Flight
from penstock.workers.scheduling.ledger import Totals
from penstock.workers.scheduling.seats import Seats
from penstock.workers.scheduling.sequence import Ints
from penstock.workers.scheduling.steady import Steady
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class Leaps:
    """Asks how far a leap may go, and leaps."""

    table: SequenceTable
    waiting: WaitingQueue
    seats: Seats
    flight: Flight
    steady: Steady
    totals: Totals

    def num_quiet(self) -> int:
        """How many steps are sure to be quiet, the one in flight included, if no verb of the
        batcher is called meanwhile; 0: not even that one is."""
        alone = len(self.flight.plans) == 1 and not self.flight.gone
        if not alone or not self.steady.holds(self.seats.rows):
            return 0
        num = self.steady.num_quiet()
        if len(self.waiting) and self.table.num_free_rows:
            # What waits for blocks may find its own among those that the next full block is.
            num = min(num, self.steady.num_to_fill)
        return num

    def leap(self, drawn: Ints) -> None:
        """Plan and commit quiet steps that draw `drawn` [steps, B], with none in flight."""
        if self.flight.plans or not self.steady.holds(self.seats.rows):
            raise ValueError("a leap starts between two steps of the same sequences")
        self.steady.leap(drawn, self.seats.publish)
        self.totals.steps += len(drawn)
