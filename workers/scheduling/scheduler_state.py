"""State of a batcher, shared by the components of the batcher."""

from dataclasses import dataclass

from penstock.workers.scheduling.config import SchedulerConfig
from penstock.workers.scheduling.decode_fast_path import DecodeFastPath
from penstock.workers.scheduling.in_flight import InFlightSteps
from penstock.workers.scheduling.kv_pool import BlockPool
from penstock.workers.scheduling.leases import Leases
from penstock.workers.scheduling.running_batch import RunningBatch
from penstock.workers.scheduling.step_budget import StepBudget
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import WaitingQueue


@dataclass(slots=True)
class Totals:
    """Totals since the start of the worker."""

    steps: int = 0
    submitted: int = 0
    computed: int = 0  # prompt positions computed by the model
    cached: int = 0  # prompt positions found in the prefix cache
    preemptions: int = 0


class SchedulerState:
    """Waiting and running sequences, their blocks, and the steps in flight.

    `Batcher` changes this state only through `Admission`, `Preemption`, `SequenceGroups` and the
    objects of the state itself.

    Args:
        limits: limits of the scheduler.
        table: the empty sequence table to use; None makes one.
    """

    def __init__(self, limits: SchedulerConfig, table: SequenceTable | None = None) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        if table is None:
            table = SequenceTable(limits.max_sequences, limits.max_model_len, limits.block_size)
        self.table = table
        self.waiting = WaitingQueue()
        self.batch = RunningBatch(self.table, self.pool)
        self.budget = StepBudget(limits, self.table, self.batch)
        self.leases = Leases(self.pool, int(limits.num_blocks * limits.lease_fraction))
        self.in_flight = InFlightSteps(self.batch)
        self.fast_path = DecodeFastPath(self.table, self.pool)
        self.totals = Totals()
