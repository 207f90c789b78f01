"""Plans the tokens of each step and updates the sequences after the step (continuous batching).

Prefill and decode are not separate phases. Every running sequence has uncomputed tokens: one token
(decode) or several (prefill, or recomputation after preemption). Each step computes some of these
tokens; all sequences of a step share one token budget.
"""

from typing import Any

import numpy as np

from penstock.common.worker_load import WorkerLoad
from penstock.workers.scheduling.admission import Admission
from penstock.workers.scheduling.config import SchedulerConfig, check_fits
from penstock.workers.scheduling.forced_tokens import NO_FORCED, ForcedTokens, append_forced
from penstock.workers.scheduling.preemption import Preemption
from penstock.workers.scheduling.scheduler_state import SchedulerState
from penstock.workers.scheduling.sequence import (
    BeamRows,
    FinishReason,
    Ints,
    Key,
    NewSequence,
    QueueFull,
    SchedulerEvent,
    StepOutput,
    StepPlan,
)
from penstock.workers.scheduling.sequence_groups import SequenceGroups
from penstock.workers.scheduling.stages import plan_idle_rows
from penstock.workers.scheduling.stats import check, debug_state, worker_load
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import make_sequence_states

__all__ = ["Batcher", "SchedulerConfig"]

_NONE = int(FinishReason.NONE)  # access to an enum member is slow


class Batcher:
    """Continuous batching over one block pool.

    Without pipeline parallelism, one step is in flight. A second step may be planned if its plan
    needs no token of the first. With pipeline parallelism, one step per stage may be in flight. Any
    method may be called between `plan` and `commit`: planned sequences keep rows and blocks.
    """

    def __init__(self, limits: SchedulerConfig, table: SequenceTable | None = None) -> None:
        self.limits = limits
        self.state = state = SchedulerState(limits, table)
        self.table, self.pool = state.table, state.pool
        self._waiting, self._batch, self._leases = state.waiting, state.batch, state.leases
        self._in_flight, self._fast_path = state.in_flight, state.fast_path
        self._totals, self._budget = state.totals, state.budget
        self._groups = SequenceGroups(state)
        self._admission = Admission(state, self._groups)
        self._preemption = Preemption(state, self._groups)

    # ------------------------------------------------------------ submission and removal

    def submit(self, new: NewSequence) -> None:
        """Queue a sequence.

        Raises:
            NeverFits: the sequence could not run on this worker even alone.
            QueueFull: `max_queued` sequences are already waiting.
            ValueError: the key of the sequence is already in use.
        """
        if new.key in self._groups or new.key in self._leases:
            raise ValueError(f"sequence key {new.key!r} is in use already")
        check_fits(new, self.limits)
        if len(self._waiting) >= self.limits.max_queued:
            raise QueueFull(f"the queue has {len(self._waiting)} requests, the maximum: try later")
        group = make_sequence_states(new, self._totals.submitted + 1, self.limits.hash_key)
        self._groups.add(new.key, group)
        self._totals.submitted += len(group)
        self._waiting.push(group[0])

    def drop(self, key: Key) -> None:
        """Remove a sequence in any state, with its lease and its events; ignore an unknown key.

        Blocks that a KV transfer reads or writes are kept until `unpin` or `transfer_drained`.
        """
        self._groups.drop(key)

    def drop_choice(self, key: Key, choice: int) -> None:
        """Remove a choice; emit `Finished` if none is left. Ignore beams and unknown choices."""
        self._groups.drop_choice(key, choice)

    def finish(self, key: Key) -> None:
        """End all choices of a sequence and emit `Finished`; ignore an unknown key."""
        self._groups.finish(key)

    def fail(self, key: Key) -> None:
        """Drop a sequence with non-finite logits; unpublish its blocks to prevent their reuse."""
        self._groups.fail(key)

    def request_yield(self, key: Key) -> None:
        """Make a sequence yield: stop it at its next step boundary and lease its KV blocks.

        A waiting sequence has no blocks, and a receiving one yields after its KV transfer. With
        several choices or beams, only the prompt's blocks are leased. Ignore an unknown key.
        """
        self._groups.request_yield(key)

    # ------------------------------------------------------------ KV transfer

    def pin(self, key: Key, have: int) -> Ints:
        """Pin a lease and return its blocks of positions [have, kv_len). Raises LeaseGone."""
        return self._leases.pin(key, have, self.limits.block_size)

    def unpin(self, key: Key) -> None:
        """Undo one `pin`, after a KV transfer from this lease has ended."""
        self._leases.unpin(key)

    def reserved_blocks(self, key: Key) -> Ints:
        """Return the blocks that a KV transfer writes; raise KeyError if `key` is not receiving."""
        return self._groups.reserved_blocks(key)

    def transfer_done(self, key: Key) -> None:
        """Run a sequence after its KV transfer succeeded; do nothing if it is not receiving."""
        self._groups.end_receiving(key, arrived=True)

    def transfer_failed(self, key: Key) -> None:
        """Run a sequence after its KV transfer failed; do nothing if it is not receiving."""
        self._groups.end_receiving(key, arrived=False)

    def transfer_drained(self, key: Key) -> None:
        """Free a dropped receiver's blocks after the last write to them; ignore an unknown key."""
        self._leases.release_abandoned(key)

    # ------------------------------------------------------------ steps

    def plan(self) -> StepPlan | None:
        """Return the plan of the next step, or None if there is nothing to compute now.

        While a step is in flight, None may also mean that the step in flight must commit first. A
        step planned while another is in flight can be removed with `withdraw`. With pipeline
        parallelism, one step per stage may be in flight; no two steps share a sequence.
        """
        plans, number = self._in_flight.plans, self._totals.steps + 1
        if self.limits.num_stages > 1:
            plan = self._plan_stage(number)
        elif len(plans) > 1:
            raise ValueError(f"{len(plans)} steps are in flight: commit one before planning more")
        else:
            plan = self._plan_next(number, ahead=bool(plans))
        if plan is not None:
            self._totals.steps = number
            plans.append(plan)
        return plan

    def withdraw(self, plan: StepPlan) -> None:
        """Remove the newest step in flight; the step must not have started to run."""
        self._in_flight.remove_newest(plan)
        self._fast_path.invalidate()
        self._in_flight.release_drained()

    def commit(
        self,
        plan: StepPlan,
        drawn: Ints,
        beams: BeamRows | None = None,
        forced: ForcedTokens = NO_FORCED,
    ) -> StepOutput:
        """Record the results of the oldest step in flight; return the new tokens.

        The output has no tokens of beams or of sequences that were removed after `plan` was made.

        Args:
            plan: the plan of the oldest step in flight.
            drawn: [S] tokens sampled for `plan.sampling_rows`, in order.
            beams: the sampling rows that are beams, and their parents; None if there are none.
            forced: tokens that must follow the sampled ones; see `append_forced`.
        """
        drawn = np.asarray(drawn, np.int32)
        if len(drawn) != plan.num_sampling:
            raise ValueError(f"`drawn` has {len(drawn)} tokens, expected {plan.num_sampling}")
        self._in_flight.remove_oldest(plan)
        self.pool.check_total()
        is_quick = not forced and not self._in_flight.released_later
        if is_quick and (output := self._fast_path.commit(plan, drawn)) is not None:
            if self._fast_path.fills(plan):
                self._batch.publish(plan.rows, plan.context_lens)
            return output
        return self._commit_to_tables(plan, drawn, beams, forced)

    def _plan_next(self, number: int, ahead: bool) -> StepPlan | None:
        plan, rows = None, self._batch.rows
        if self._fast_path.can_continue(rows):
            left = self._budget.tokens(rows) - len(rows)
            if not self._admission.admit(self._budget.for_new_prompts(left, num_prompt=0)):
                plan = self._fast_path.next(number, ahead)
        if plan is None and not ahead:
            plan = self._plan_from_tables(number)
        return plan

    def _plan_from_tables(self, number: int) -> StepPlan | None:
        budget = self._budget.tokens(self._batch.rows)
        counts = self._preemption.reclaim_blocks(budget)
        num_events = len(self._groups.events)
        left, num_prompt = budget - int(counts.sum()), int(counts[counts > 1].sum())
        if self._admission.admit(self._budget.for_new_prompts(left, num_prompt)):
            # Forks of a cached prompt start in this step and may need more blocks than are free.
            counts = self._preemption.reclaim_blocks(budget)
            self._groups.forget_preempted(num_events)
        rows = self._batch.rows
        if not counts.all():
            rows, counts = rows[counts > 0], counts[counts > 0]
        if not rows.size:
            return None
        copies = self._batch.block_growth.grow(rows, counts)
        plan = self._batch.with_forks(self.table.pack(number, rows, counts, copies))
        if self._batch.is_steady:
            self._fast_path.start(plan, self._batch.rows)
        else:
            self._fast_path.invalidate()
        return plan

    def _plan_stage(self, number: int) -> StepPlan | None:
        """Plan the next pipeline step, from sequences that are not in a step in flight."""
        plans, budget = self._in_flight.plans, self._budget.tokens(self._batch.rows)
        if len(plans) >= self.limits.num_stages:
            return None
        if not plans:  # preempt only if no step in flight uses the blocks
            self._preemption.reclaim_blocks(budget)
        self._admission.admit(self._budget.for_new_prompts(budget, num_prompt=0))
        # beams exchange blocks at a commit, so only one step may be in flight
        if self._batch.beams:
            return None if plans else self._plan_from_tables(number)
        return plan_idle_rows(self.state, number)

    def _commit_to_tables(
        self, plan: StepPlan, drawn: Ints, beams: BeamRows | None, forced: ForcedTokens
    ) -> StepOutput:
        table, rows, drawing, lengths = self.table, plan.rows, plan.sampling_rows, plan.context_lens
        self._totals.computed += self.table.num_prompt_computed(plan)
        if self._in_flight.released_later:
            kept, drawn_kept = self._in_flight.still_held(rows), self._in_flight.still_held(drawing)
            rows, lengths = rows[kept], lengths[kept]
            drawn, drawing = drawn[drawn_kept], drawing[drawn_kept]
            self._in_flight.release_drained()
        table.num_computed[rows] = lengths
        if len(plan.scored):
            table.record_scored(rows, lengths)
        self._batch.publish(rows, lengths)
        if self._batch.fork_parents and (cancelled := self._groups.start_forks()):
            kept = ~np.isin(drawing, cancelled)
            drawn, drawing = drawn[kept], drawing[kept]
        if beams is not None:
            self._batch.beams.reorder(beams, drawing)
        indices = table.num_tokens[drawing] - table.num_prompt[drawing]
        finishes = table.append(drawing, drawn)
        output = _step_output(table, drawing, indices, drawn, finishes, beams)
        if forced:
            output = append_forced(self.state, output, forced)
        due = np.concatenate((rows, drawing)) if len(plan.forks) else rows
        due = due[table.num_tokens[due] >= table.yield_len[due]]
        ended = output.rows[output.finishes != _NONE].tolist()
        for row in ended:
            self._groups.finish_row(row)
        for row in due.tolist():
            # If one choice of a sequence yields, all its choices yield.
            if row not in ended and row in self._batch:
                self._groups.yield_if_due(self._batch.sequence(row).key)
        return output

    # ------------------------------------------------------------ events and state

    def events(self) -> list[SchedulerEvent]:
        """Return the events since the last call, in order."""
        events, self._groups.events = self._groups.events, []
        return events

    def load(self) -> WorkerLoad:
        """Return the current load, and totals since the start of the worker."""
        return worker_load(self.state)

    def exclude_from_totals(self, num_prompt: int) -> None:
        """Subtract the `num_prompt` computed prompt tokens of a canary from the totals."""
        self._totals.computed -= num_prompt

    def check(self) -> None:
        """Raise AssertionError if a block's reference counts do not match its holders."""
        check(self.state, self._groups.sequences())

    def debug_state(self) -> dict[str, Any]:
        """Return sequences, block counts and steps in flight as plain values, without tokens."""
        return debug_state(self.state, self._groups.sequences())


def _step_output(
    table: SequenceTable,
    rows: Ints,
    indices: Ints,
    tokens: Ints,
    finishes: Ints,
    beams: BeamRows | None,
) -> StepOutput:
    """Return the output of a step, leaving out beams: only the beam search uses their tokens."""
    if beams is not None:
        visible = ~np.isin(rows, beams.rows)
        rows, indices, tokens, finishes = (
            each[visible] for each in (rows, indices, tokens, finishes)
        )
    keys = table.keys[rows].tolist()
    return StepOutput(keys, table.choices[rows], rows, indices, tokens, finishes)
