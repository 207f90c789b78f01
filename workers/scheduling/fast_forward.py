"""Fast-forward over decode steps that need no scheduling decision. Used by the simulator only.

In these steps no sequence arrives, ends, yields or loses blocks, so the state after the steps
follows from the state before the steps. `DecodeFastPath` checks the running sequences; this module
also checks the waiting queue and the steps in flight.
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
    """Fast-forward of a batcher: counts the steps that can be skipped and commits these at once."""

    table: SequenceTable
    waiting: WaitingQueue
    batch: RunningBatch
    in_flight: InFlightSteps
    fast_path: DecodeFastPath
    totals: Totals

    def num_skippable(self) -> int:
        """Return how many steps, including the one in flight, need no scheduling decision.

        The number is valid until another method of the batcher is called. It is 0 if even the step
        in flight may need a decision.
        """
        only_step = len(self.in_flight.plans) == 1 and not self.in_flight.released_later
        if not only_step or not self.fast_path.can_continue(self.batch.rows):
            return 0
        num = self.fast_path.num_skippable()
        if len(self.waiting) and self.table.num_free_rows:
            # The next published block may extend the cached prefix of a waiting sequence.
            num = min(num, self.fast_path.num_to_fill)
        return num

    def skip(self, drawn: Ints) -> None:
        """Plan and commit steps with the sampled tokens `drawn` [steps, B].

        No step may be in flight.
        """
        if self.in_flight.plans or not self.fast_path.can_continue(self.batch.rows):
            raise ValueError("cannot fast-forward: a step is in flight or sequences changed")
        self.fast_path.skip(drawn, self.batch.publish)
        self.totals.steps += len(drawn)
