"""Reports the load of the scheduler and checks its bookkeeping."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from penstock.common.worker_load import WorkerLoad
from penstock.workers.scheduling.in_flight import InFlightSteps
from penstock.workers.scheduling.kv_pool import BlockPool, State
from penstock.workers.scheduling.leases import Leases
from penstock.workers.scheduling.preemption import Preemption
from penstock.workers.scheduling.running_batch import RunningBatch
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import SequencePhase, SequenceState, WaitingQueue


@dataclass(slots=True)
class Totals:
    """Totals since the start of the worker."""

    steps: int = 0
    submitted: int = 0
    computed: int = 0  # prompt positions computed by the model
    cached: int = 0  # prompt positions found in the prefix cache


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Read-only view of the scheduler's parts."""

    table: SequenceTable
    pool: BlockPool
    waiting: WaitingQueue
    batch: RunningBatch
    leases: Leases
    preemption: Preemption
    in_flight: InFlightSteps
    totals: Totals

    def load(self) -> WorkerLoad:
        """Return the scheduler's part of the worker load; the engine adds data about its steps."""
        rows, pool = self.batch.rows, self.pool
        remaining = self.table.num_tokens[rows] - self.table.num_computed[rows]
        return WorkerLoad(
            queued=len(self.waiting),
            queued_tokens=self.waiting.num_tokens + int(remaining[remaining > 1].sum()),
            running=len(self.batch),
            free_blocks=pool.num(State.FREE),
            cached_blocks=pool.num(State.CACHED),
            leased_blocks=pool.num(State.LEASED),
            reserved_blocks=pool.num(State.RESERVED),
            used_blocks=pool.num(State.USED),
            prompt_tokens_computed=self.totals.computed,
            prompt_tokens_cached=self.totals.cached,
            preemptions=self.preemption.num_preempted,
            unwritten_slots=self.batch.num_unwritten(),
        )

    def debug_state(self, sequences: Collection[SequenceState]) -> dict[str, Any]:
        """Return the scheduler's state as plain values, without tokens.

        Args:
            sequences: all sequences that the scheduler has.
        """
        try:
            self.check(sequences)
            balance = "balances"
        except (AssertionError, IndexError, KeyError, ValueError) as error:
            balance = f"does not balance: {error or type(error).__name__}"
        return {
            "ledger": balance,
            "blocks": {state.name.lower(): self.pool.num(state) for state in State},
            "sequences": [self._sequence_facts(ticket) for ticket in sequences],
            "steps_in_flight": [plan.describe() for plan in self.in_flight.plans],
        }

    def _sequence_facts(self, ticket: SequenceState) -> dict[str, Any]:
        table, row = self.table, ticket.row
        found = {
            "sequence": str(ticket.key),
            "choice": ticket.choice,
            "phase": ticket.phase.name.lower(),
            "prompt_len": ticket.new.num_prompt,
            "num_tokens": len(ticket.tokens) if row < 0 else int(table.num_tokens[row]),
        }
        if row >= 0:
            found |= {
                "row": row,
                "num_computed": int(table.num_computed[row]),
                "num_blocks": int(table.num_blocks[row]),
            }
        return found

    def check(self, sequences: Collection[SequenceState]) -> None:
        """Raise AssertionError if rows or blocks in use do not match `sequences`."""
        used, reserved = self.batch.holders()
        leased, abandoned = self.leases.holders()
        self.pool.check(used, leased, reserved + abandoned)
        table, rows = self.table, self.batch.rows
        behind = [
            one for one in sequences if one.phase is SequencePhase.AWAITING_FORK and one.row < 0
        ]
        num_in_batch = len(self.batch) - len(self.in_flight.released_later)
        assert len(sequences) == len(self.waiting) + len(behind) + num_in_batch
        assert len(self.batch) == table.num_rows - table.num_free_rows
        assert (table.num_computed[rows] < table.num_tokens[rows]).all()
        assert (table.num_computed[rows] <= table.num_blocks[rows] * table.block_size).all()
