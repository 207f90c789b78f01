"""How full the scheduler is, and whether its books balance."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from penstock.common.worker_load import WorkerLoad
from penstock.workers.scheduling.admission import Admission
from penstock.workers.scheduling.flight import Flight
from penstock.workers.scheduling.kv_pool import BlockPool, State
from penstock.workers.scheduling.leases import Leases
from penstock.workers.scheduling.seats import Seats
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import Phase, Ticket, WaitingQueue


@dataclass(slots=True)
class Totals:
    """Counted since the start."""

    steps: int = 0
    submitted: int = 0
    computed: int = 0  # prompt positions run through the model
    cached: int = 0  # prompt positions found in the prefix cache


@dataclass(frozen=True, slots=True)
class Ledger:
    """Reads the scheduler's parts; writes none."""

    table: SequenceTable
    pool: BlockPool
    waiting: WaitingQueue
    seats: Seats
    leases: Leases
    admission: Admission
    flight: Flight
    totals: Totals

    def load(self) -> WorkerLoad:
        """What the scheduler knows of the worker's load; the engine adds its steps."""
        rows, pool = self.seats.rows, self.pool
        remaining = self.table.num_tokens[rows] - self.table.num_computed[rows]
        return WorkerLoad(
            queued=len(self.waiting),
            queued_tokens=self.waiting.num_tokens + int(remaining[remaining > 1].sum()),
            running=len(self.seats),
            free_blocks=pool.num(State.FREE),
            cached_blocks=pool.num(State.CACHED),
            leased_blocks=pool.num(State.LEASED),
            reserved_blocks=pool.num(State.RESERVED),
            used_blocks=pool.num(State.USED),
            prompt_tokens_computed=self.totals.computed,
            prompt_tokens_cached=self.totals.cached,
            preemptions=self.admission.num_preempted,
            unwritten_slots=self.seats.num_unwritten(),
        )

    def describe(self, tickets: Collection[Ticket]) -> dict[str, Any]:
        """Everything but what is said, in plain values; `tickets` are all who are here."""
        try:
            self.check(tickets)
            balance = "balances"
        except (AssertionError, IndexError, KeyError, ValueError) as error:
            balance = f"does not balance: {error or type(error).__name__}"
        return {
            "ledger": balance,
            "blocks": {state.name.lower(): self.pool.num(state) for state in State},
            "sequences": [self._describe(ticket) for ticket in tickets],
            "steps_in_flight": [plan.describe() for plan in self.flight.plans],
        }

    def _describe(self, ticket: Ticket) -> dict[str, Any]:
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

    def check(self, tickets: Collection[Ticket]) -> None:
        """AssertionError if anything is held for nobody; `tickets` are all who are here."""
        used, reserved = self.seats.holders()
        leased, abandoned = self.leases.holders()
        self.pool.check(used, leased, reserved + abandoned)
        table, rows = self.table, self.seats.rows
        behind = [one for one in tickets if one.phase is Phase.FOLLOWING and one.row < 0]
        seated = len(self.seats) - len(self.flight.gone)
        assert len(tickets) == len(self.waiting) + len(behind) + seated
        assert len(self.seats) == table.num_rows - table.num_free_rows
        assert (table.num_computed[rows] < table.num_tokens[rows]).all()
        assert (table.num_computed[rows] <= table.num_blocks[rows] * table.block_size).all()
