"""Plans the steps of a pipeline: several are in flight, and no two of them share a sequence."""

import numpy as np

from penstock.workers.scheduling.running_batch import split_token_budget
from penstock.workers.scheduling.scheduler_state import SchedulerState
from penstock.workers.scheduling.sequence import Ints, StepPlan


def plan_idle_rows(state: SchedulerState, number: int) -> StepPlan | None:
    """Plan step `number` for some of the rows that are not in a step in flight.

    The plan has at most 1 / `num_stages` of the running rows, so that every stage gets work. Return
    None if all rows are in steps in flight, or if there are too few blocks.
    """
    rows, counts = _split_budget_over_idle(state)
    batch, growth = state.batch, state.batch.block_growth
    if not rows.size or growth.num_missing(rows, counts) > state.pool.num_available:
        return None
    return batch.with_forks(state.table.pack(number, rows, counts, growth.grow(rows, counts)))


def _split_budget_over_idle(state: SchedulerState) -> tuple[Ints, Ints]:
    """Choose the rows of the next step from the table rows that are not in a step in flight.

    Returns:
        [n] table rows, at most 1 / `num_stages` of the running rows, and [n] token counts.
    """
    running, table, limits = state.batch.rows, state.table, state.limits
    rows = running[~np.isin(running, state.in_flight.rows)]
    remaining = table.num_tokens[rows] - table.num_computed[rows]
    counts = split_token_budget(remaining, table.decode_len[rows], state.budget.tokens(rows))
    scheduled = np.flatnonzero(counts)[: -(-len(running) // limits.num_stages)]
    return rows[scheduled], counts[scheduled]
