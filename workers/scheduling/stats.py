"""Reports the load of the scheduler and checks its bookkeeping."""

from collections.abc import Collection
from typing import Any

from penstock.common.worker_load import WorkerLoad
from penstock.workers.scheduling.kv_pool import State
from penstock.workers.scheduling.scheduler_state import SchedulerState
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import SequencePhase, SequenceState


def worker_load(state: SchedulerState) -> WorkerLoad:
    """Return the scheduler's part of the worker load; the engine adds data about its steps."""
    totals = state.totals
    queued, queued_tokens, running = queue_sizes(state)
    used, leased, reserved, cached, free = state.pool.counts
    return WorkerLoad(
        queued=queued,
        queued_tokens=queued_tokens,
        running=running,
        free_blocks=free,
        cached_blocks=cached,
        leased_blocks=leased,
        reserved_blocks=reserved,
        used_blocks=used,
        prompt_tokens_computed=totals.computed,
        prompt_tokens_cached=totals.cached,
        preemptions=totals.preemptions,
        unwritten_slots=state.batch.num_unwritten(),
        receiving=state.batch.num_receiving,
    )


def queue_sizes(state: SchedulerState) -> tuple[int, int, int]:
    """Return `queued`, `queued_tokens` and `running` of the worker load."""
    rows, waiting = state.batch.rows, state.waiting
    remaining = state.table.num_tokens[rows] - state.table.num_computed[rows]
    queued_tokens = waiting.num_tokens + int(remaining[remaining > 1].sum())
    return len(waiting), queued_tokens, len(state.batch)


def debug_state(state: SchedulerState, sequences: Collection[SequenceState]) -> dict[str, Any]:
    """Return the scheduler's state as plain values, without tokens.

    Args:
        state: state of the scheduler.
        sequences: all sequences that the scheduler has.
    """
    try:
        check(state, sequences)
        balance = "balances"
    except (AssertionError, IndexError, KeyError, ValueError) as error:
        balance = f"does not balance: {error or type(error).__name__}"
    return {
        "ledger": balance,
        "blocks": {each.name.lower(): state.pool.num(each) for each in State},
        "sequences": [_sequence_facts(ticket, state.table) for ticket in sequences],
        "steps_in_flight": [plan.describe() for plan in state.in_flight.plans],
    }


def _sequence_facts(ticket: SequenceState, table: SequenceTable) -> dict[str, Any]:
    row = ticket.row
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


def check(state: SchedulerState, sequences: Collection[SequenceState]) -> None:
    """Raise AssertionError if rows or blocks in use do not match `sequences`."""
    used, reserved = state.batch.holders()
    used += [source for plan in state.in_flight.plans for source in plan.copies[:, :1]]
    leased, abandoned = state.leases.holders()
    state.pool.check(used, leased, reserved + abandoned)
    table, rows = state.table, state.batch.rows
    behind = [one for one in sequences if one.phase is SequencePhase.AWAITING_FORK and one.row < 0]
    num_in_batch = len(state.batch) - len(state.in_flight.released_later)
    assert len(sequences) == len(state.waiting) + len(behind) + num_in_batch
    receiving = [one for one in sequences if one.phase is SequencePhase.RECEIVING]
    assert state.batch.num_receiving == len(receiving)
    assert len(state.batch) == table.num_rows - table.num_free_rows
    assert (table.num_computed[rows] < table.num_tokens[rows]).all()
    assert (table.num_computed[rows] <= table.num_blocks[rows] * table.block_size).all()
