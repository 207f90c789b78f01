"""Several steps at once: those in which nothing is decided, for who plays a worker in virtual time.

Nobody comes, ends, yields or loses blocks in them: where the batcher stands after them follows from
where it stood before. `DecodeFastPath` knows the steps, this knows who else could have a say.
"""

from dataclasses import dataclass

from penstock.workers.scheduling.decode_fast_path import DecodeFastPath
from penstock.workers.scheduling.in_flight import InFlightSteps
from penstock.workers.scheduling.running_batch import RunningBatch
from penstock.workers.scheduling.sequence import Ints
from penstock.workers.scheduling.stats import Totals
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class FastForward:
    """Asks how far a leap may go, and leaps."""

    table: SequenceTable
    waiting: WaitingQueue
    batch: RunningBatch
    in_flight: InFlightSteps
    fast_path: DecodeFastPath
    totals: Totals

    def num_skippable(self) -> int:
        """How many steps are sure to be quiet, the one in flight included, if no verb of the
        batcher is called meanwhile; 0: not even that one is."""
        only_step = len(self.in_flight.plans) == 1 and not self.in_flight.released_later
        if not only_step or not self.fast_path.can_continue(self.batch.rows):
            return 0
        num = self.fast_path.num_skippable()
        if len(self.waiting) and self.table.num_free_rows:
            # What waits for blocks may find its own among those that the next full block is.
            num = min(num, self.fast_path.num_to_fill)
        return num

    def skip(self, drawn: Ints) -> None:
        """Plan and commit quiet steps that draw `drawn` [steps, B], with none in flight."""
        if self.in_flight.plans or not self.fast_path.can_continue(self.batch.rows):
            raise ValueError("a leap starts between two steps of the same sequences")
        self.fast_path.skip(drawn, self.batch.publish)
        self.totals.steps += len(drawn)
