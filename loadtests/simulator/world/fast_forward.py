"""Fast-forward over decode steps that need no scheduling decision.

In these steps no sequence arrives, ends, yields or loses blocks. The state after the steps
therefore follows from the state before them.
"""

import numpy as np

from penstock.workers.scheduling.scheduler_state import SchedulerState
from penstock.workers.scheduling.sequence import Ints, StepPlan


class FastForward:
    """Fast-forward of a batcher. Counts the steps that can be skipped and commits them together."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._table = state.table
        self._fast_path = state.fast_path

    def num_skippable(self) -> int:
        """Return how many steps, including the one in flight, need no scheduling decision.

        In these steps no sequence ends or yields, and enough blocks are available. The number is 0
        if the step in flight may already need a decision. It is also 0 if a sequence has stop
        tokens, because sampling a stop token may end the sequence. The number is valid until
        another method of the batcher is called.
        """
        state, last = self._state, self._fast_path.last
        only_step = len(state.in_flight.plans) == 1 and not state.in_flight.released_later
        if last is None or not only_step or not self._fast_path.can_continue(state.batch.rows):
            return 0
        if (self._table.stop_tokens[last.rows] >= 0).any():
            return 0
        num = self._fast_path.num_until_limit()
        while num > 1 and self._num_missing(last, num - 1) > state.pool.num_available:
            num //= 2
        if len(state.waiting) and self._table.num_free_rows:
            # Stop at a block boundary: a full block may extend a waiting sequence's cached prefix.
            num = min(num, self._fast_path.num_until_boundary)
        return max(num, 0)

    def skip(self, drawn: Ints) -> None:
        """Plan and commit the next steps together. No step may be in flight.

        Args:
            drawn: [steps, B] sampled tokens of the B running sequences. None of these steps may
                need a scheduling decision.
        """
        state, fast_path = self._state, self._fast_path
        if state.in_flight.plans or not fast_path.can_continue(state.batch.rows):
            raise ValueError(
                "cannot fast-forward: a step is in flight, or the running sequences changed "
                "since the last step"
            )
        done = 0
        while done < len(drawn):
            last = fast_path.last
            if last is None or fast_path.num_until_limit() <= len(drawn) - done:
                raise ValueError(
                    "cannot fast-forward: a sequence would reach its length limit within these "
                    "steps"
                )
            num = min(fast_path.num_until_boundary - 1, len(drawn) - done)
            plan = (
                self._skip_within_blocks(last, drawn[done : done + num])
                if num
                else self._skip_one(last, drawn[done])
            )
            if fast_path.fills(plan):
                state.batch.publish(plan.rows, plan.context_lens)
            done += max(num, 1)
        state.totals.steps += len(drawn)

    def _skip_within_blocks(self, last: StepPlan, drawn: Ints) -> StepPlan:
        """Commit n steps with tokens `drawn` [n, B] and return the last plan.

        These steps must need no new block.
        """
        table, num = self._table, len(drawn)
        lengths = last.context_lens + num
        columns = last.context_lens[:, None] + np.arange(1, num + 1, dtype=np.int32)
        table.tokens[last.rows[:, None], columns] = drawn.T
        table.num_computed[last.rows] = lengths
        table.num_tokens[last.rows] = lengths + 1
        positions = lengths - 1
        self._fast_path.last = plan = StepPlan(
            number=last.number + num,
            rows=last.rows,
            tokens=table.tokens[last.rows, positions],
            positions=positions,
            query_starts=last.query_starts,
            context_lens=lengths,
            block_tables=last.block_tables,
            slots=last.slots + num,
            samples=last.samples,
        )
        return plan

    def _skip_one(self, last: StepPlan, drawn: Ints) -> StepPlan:
        """Plan the next step, commit it with the sampled tokens `drawn` [B] and return its plan."""
        plan = self._fast_path.next(last.number + 1, ahead=False)
        if plan is None or self._fast_path.commit(plan, drawn) is None:
            raise ValueError(
                "cannot fast-forward: there are too few free KV blocks, or a sequence may end in "
                "the next step"
            )
        return plan

    def _num_missing(self, last: StepPlan, num: int) -> int:
        """Return how many blocks must be taken for the `num` steps that follow the last plan."""
        return int(self._table.num_missing_blocks(last.rows, last.context_lens + num).sum())
