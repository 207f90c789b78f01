"""Plans the tokens of each step and updates the sequences after the step (continuous batching).

Prefill and decode are not separate phases. Every running sequence has uncomputed tokens: one
(decode) or several (prefill, or recomputation after preemption). Each step computes some of these
tokens, within one token budget for all sequences.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from penstock.common.worker_load import WorkerLoad
from penstock.workers.scheduling.admission import Admission
from penstock.workers.scheduling.config import SchedulerConfig, check_fits
from penstock.workers.scheduling.decode_fast_path import DecodeFastPath
from penstock.workers.scheduling.fast_forward import FastForward
from penstock.workers.scheduling.in_flight import InFlightSteps
from penstock.workers.scheduling.kv_pool import BlockPool
from penstock.workers.scheduling.leases import Leases
from penstock.workers.scheduling.preemption import Preemption
from penstock.workers.scheduling.running_batch import RunningBatch
from penstock.workers.scheduling.sequence import (
    NO_TOKENS,
    Admitted,
    Bools,
    FinishReason,
    Ints,
    Key,
    NewSequence,
    QueueFull,
    Reserved,
    SchedulerEvent,
    StepOutput,
    StepPlan,
)
from penstock.workers.scheduling.sequence_groups import SequenceGroups
from penstock.workers.scheduling.stats import SchedulerStats, Totals
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import SequencePhase, WaitingQueue, make_sequence_states

__all__ = ["Batcher", "SchedulerConfig"]


class Batcher:
    """Continuous batching over one block pool.

    One step is in flight; with pipeline parallelism, one per stage. Without pipeline parallelism, a
    second step may be planned if its plan needs no token of the first. Between `plan` and `commit`
    any method may be called: sequences in flight keep their rows and blocks.
    """

    def __init__(self, limits: SchedulerConfig) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.table = SequenceTable(limits.max_sequences, limits.max_model_len, limits.block_size)
        self._waiting = WaitingQueue()
        self._batch = RunningBatch(self.table, self.pool)
        self._leases = Leases(self.pool, int(limits.num_blocks * limits.lease_fraction))
        components = self.table, self.pool, self._waiting, self._batch, self._leases
        self._admission = Admission(limits, *components)
        self._preemption = Preemption(*components)
        self._fast_path = DecodeFastPath(self.table, self.pool)
        self._in_flight = InFlightSteps(self._batch)
        queues = self.table, self._waiting, self._batch
        self._groups = SequenceGroups(*queues, self._leases, self._in_flight, self._fast_path)
        self._totals = Totals()
        self._stats = SchedulerStats(*components, self._preemption, self._in_flight, self._totals)
        self.fast_forward = FastForward(*queues, self._in_flight, self._fast_path, self._totals)

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
            raise QueueFull(f"queue full, {len(self._waiting)} sequences are waiting: try later")
        group = make_sequence_states(new, self._totals.submitted + 1)
        self._groups.add(new.key, group)
        self._totals.submitted += len(group)
        self._waiting.push(group[0])

    def drop(self, key: Key) -> None:
        """Remove a sequence in any state, or its lease, and its events; ignore an unknown key.

        Blocks that a KV transfer reads or writes are kept until `unpin` or `transfer_drained`.
        """
        self._groups.drop(key)

    def drop_choice(self, key: Key, choice: int) -> None:
        """Remove a choice; emit `Finished` after the last one. Ignore beams and unknown choices."""
        self._groups.drop_choice(key, choice)

    def finish(self, key: Key) -> None:
        """End all choices of a sequence and emit `Finished`; ignore an unknown key."""
        self._groups.finish(key)

    def fail(self, key: Key) -> None:
        """Drop a sequence with non-finite logits; unpublish its blocks to prevent their reuse."""
        for ticket in self._groups.choices(key):
            if ticket.phase is SequencePhase.RUNNING:
                self.pool.forget(self.table.blocks(ticket.row))
        self.drop(key)

    def request_yield(self, key: Key) -> None:
        """Stop a sequence at its next step boundary and lease its blocks; ignore an unknown key.

        Waiting sequences have no blocks to lease; receiving sequences yield after their KV
        transfer. With several choices or beams, only the blocks of the prompt are leased.
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
        """Return blocks of positions [have, source_len); KeyError if `key` is not receiving."""
        ticket = self._groups.receiver(key)
        if ticket is None:
            raise KeyError(key)
        return self._batch.reserved(ticket)

    def transfer_done(self, key: Key) -> None:
        """Run a sequence after its KV transfer succeeded; do nothing if it is not receiving."""
        self._end_receiving(key, arrived=True)

    def transfer_failed(self, key: Key) -> None:
        """Run a sequence after its KV transfer failed; do nothing if it is not receiving."""
        self._end_receiving(key, arrived=False)

    def transfer_drained(self, key: Key) -> None:
        """Free the blocks of a dropped receiver, after all writes; ignore an unknown key."""
        self._leases.release_abandoned(key)

    # ------------------------------------------------------------ steps

    def plan(self, now: float) -> StepPlan | None:
        """Return the plan of the next step, or None if there is nothing to compute now.

        While a step is in flight, None may also mean that this step must be committed first. A step
        planned while another is in flight can be removed with `withdraw`. With pipeline
        parallelism, one step per stage may be in flight; no two of these steps share a sequence.

        Args:
            now: time in seconds, for policies that depend on waiting times; unused at present.
        """
        if self.limits.num_stages > 1:
            return self._plan_stage()
        if len(self._in_flight.plans) > 1:
            raise ValueError("two steps are in flight: commit one before planning the next")
        ahead, number = bool(self._in_flight.plans), self._totals.steps + 1
        plan, rows = None, self._batch.rows
        if self._fast_path.can_continue(rows) and not self._admit(
            self.limits.max_batched_tokens - len(rows)
        ):
            plan = self._fast_path.next(number, ahead)
        if plan is None and not ahead:
            plan = self._plan_from_tables(number)
        if plan is not None:
            self._totals.steps = number
            self._in_flight.plans.append(plan)
        return plan

    def withdraw(self, plan: StepPlan) -> None:
        """Remove the newest step in flight; the step must not have started to run."""
        plans = self._in_flight.plans
        if not plans or plan is not plans[-1]:
            raise ValueError("not the newest step in flight")
        if len(plan.copies):
            raise ValueError("a step that copies blocks cannot be withdrawn")
        plans.pop()
        self._fast_path.invalidate()
        self._in_flight.release_drained()

    def commit(self, plan: StepPlan, drawn: Ints, parents: Ints | None = None) -> StepOutput:
        """Record the results of the oldest step in flight.

        Args:
            plan: the plan of that step.
            drawn: [S] tokens sampled for `plan.sampling_rows`, in order.
            parents: [S] the table row that each sampling row continues from: for a beam, a row of
                the same beam search; otherwise the row itself. None if there are no beams.

        Returns:
            The new tokens, except those of beams and of sequences removed after `plan` was made.
        """
        plans = self._in_flight.plans
        if not plans or plan is not plans[0]:
            raise ValueError("not the first step in flight")
        drawn = np.asarray(drawn, np.int32)
        if len(drawn) != len(plan.sampling_rows):
            raise ValueError("drawn must have exactly a token for each sampling row of the plan")
        del plans[0]
        self.pool.check_total()
        if (
            not self._in_flight.released_later
            and (output := self._fast_path.commit(plan, drawn)) is not None
        ):
            if self._fast_path.fills(plan):
                self._batch.publish(plan.rows, plan.context_lens)
            return output
        return self._commit_to_tables(plan, drawn, parents)

    def _plan_from_tables(self, number: int) -> StepPlan | None:
        budget = self.limits.max_batched_tokens
        counts = self._preemption.reclaim_blocks(budget)
        num_events = len(self._groups.events)
        if self._admit(budget - int(counts.sum())):
            # Forks of a cached prompt start at once and may need more blocks than are available.
            counts = self._preemption.reclaim_blocks(budget)
            self._groups.forget_preempted(num_events)
        rows = self._batch.rows
        if not counts.all():
            scheduled = counts > 0
            rows, counts = rows[scheduled], counts[scheduled]
        if not rows.size:
            return None
        copies = self._batch.block_growth.grow(rows, counts)
        plan = self.table.pack(number, rows, counts, copies)
        if self._batch.fork_parents or self._batch.beam_groups:
            # The fast path needs constant rows, but forks start soon and beams exchange blocks.
            self._fast_path.invalidate()
            return replace(plan, forks=self._batch.plan_forks(plan))
        self._fast_path.start(plan, self._batch.rows)
        return plan

    def _plan_stage(self) -> StepPlan | None:
        """Plan the next pipeline step, from sequences that are not in a step in flight."""
        plans, budget = self._in_flight.plans, self.limits.max_batched_tokens
        if len(plans) >= self.limits.num_stages:
            return None
        if not plans:  # preempt only while no step in flight uses the blocks
            self._preemption.reclaim_blocks(budget)
        self._admit(budget)
        number = self._totals.steps + 1
        if not self._batch.beam_groups:
            plan = self._plan_idle_rows(number)
        else:  # beams exchange blocks at commit: only one step may be in flight
            plan = None if plans else self._plan_from_tables(number)
        if plan is not None:
            self._totals.steps = number
            plans.append(plan)
        return plan

    def _plan_idle_rows(self, number: int) -> StepPlan | None:
        """Plan a step for one stage's share of the table rows that are not in a step in flight."""
        rows, counts = self._batch.split_budget_over_idle(self._in_flight.plans, self.limits)
        growth = self._batch.block_growth
        if not rows.size or growth.num_missing(rows, counts) > self.pool.num_available:
            return None
        plan = self.table.pack(number, rows, counts, growth.grow(rows, counts))
        forks = self._batch.plan_forks(plan) if self._batch.fork_parents else plan.forks
        return replace(plan, forks=forks)

    def _commit_to_tables(self, plan: StepPlan, drawn: Ints, parents: Ints | None) -> StepOutput:
        table, rows, drawing, lengths = self.table, plan.rows, plan.sampling_rows, plan.context_lens
        origins = drawing if parents is None else parents
        self._totals.computed += self.table.num_prompt_computed(plan)
        if self._in_flight.released_later:
            kept, drawn_kept = self._in_flight.still_held(rows), self._in_flight.still_held(drawing)
            rows, lengths = rows[kept], lengths[kept]
            drawn, drawing, origins = (each[drawn_kept] for each in (drawn, drawing, origins))
            self._in_flight.release_drained()
        table.num_computed[rows] = lengths
        if len(plan.scored):
            table.record_scored(rows, lengths)
        self._batch.publish(rows, lengths)
        if self._batch.fork_parents:
            kept = self._fork(drawing)
            drawn, drawing, origins = (each[kept] for each in (drawn, drawing, origins))
        if parents is not None:
            self._batch.reorder_beams(drawing, origins)
        indices = table.num_tokens[drawing] - table.num_prompt[drawing]
        finishes = table.append(drawing, drawn)
        due = np.concatenate((rows, drawing)) if len(plan.forks) else rows
        due = due[table.num_tokens[due] >= table.yield_len[due]]
        has_beams = bool(self._batch.beam_groups)
        output = _step_output(table, has_beams, drawing, indices, drawn, finishes)
        ended = drawing[finishes != FinishReason.NONE].tolist()
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
        return self._stats.load()

    def exclude_from_totals(self, num_prompt: int) -> None:
        """Subtract the `num_prompt` computed prompt tokens of a canary from the totals."""
        self._totals.computed -= num_prompt

    def check(self) -> None:
        """Raise AssertionError if a block's reference counts do not match its holders."""
        self._stats.check(self._groups.sequences())

    def debug_state(self) -> dict[str, Any]:
        """Return sequences, block counts and steps in flight as plain values, without tokens."""
        return self._stats.debug_state(self._groups.sequences())

    # ------------------------------------------------------------ between steps

    def _admit(self, budget: int) -> bool:
        admitted = self._admission.admit(budget)
        for ticket, *followers in admitted:
            have = int(self.table.num_computed[ticket.row])
            if ticket.is_cancelled and not ticket.forks:
                # The leader was cancelled while waiting; its forks have just started without it.
                self._batch.release_row(ticket)
                self._groups.choice_ended(ticket)
            else:
                followers.insert(0, ticket)
            for one in followers:
                self._groups.events.append(Admitted(one.key, one.row, one.choice))
            self._totals.cached += min(have, ticket.new.num_prompt)
            if ticket.phase is SequencePhase.RECEIVING:
                self._groups.events.append(Reserved(ticket.key, have))
        return bool(admitted)

    def _fork(self, drawing: Ints) -> Bools:
        """Start forks whose prompt is computed; return a mask [n]: False for cancelled leaders."""
        kept = np.ones(len(drawing), np.bool_)
        for leader in [
            one for one in self._batch.fork_parents if one.phase is SequencePhase.RUNNING
        ]:
            row = leader.row
            if self._batch.fork_if_due(leader) and leader.is_cancelled:
                kept &= drawing != row
                self._batch.release_row(leader)
                self._groups.choice_ended(leader)
        return kept

    def _end_receiving(self, key: Key, arrived: bool) -> None:
        ticket = self._groups.receiver(key)
        if ticket is None:
            return
        if arrived:
            self.table.num_computed[ticket.row] = ticket.source_len
        self._batch.run(ticket)
        rows = np.array([ticket.row], np.int32)
        self._batch.publish(rows, self.table.num_computed[rows])
        if ticket.forks:
            self._fork(NO_TOKENS)
        if key in self._groups:
            self._groups.yield_if_due(key)


def _step_output(
    table: SequenceTable, has_beams: bool, rows: Ints, indices: Ints, tokens: Ints, finishes: Ints
) -> StepOutput:
    """Return the output of a step without beams, whose tokens only the beam search uses."""
    if has_beams:
        visible = ~table.is_beam[rows]
        rows, indices, tokens, finishes = (
            each[visible] for each in (rows, indices, tokens, finishes)
        )
    keys = table.keys[rows].tolist()
    return StepOutput(keys, table.choices[rows], rows, indices, tokens, finishes)
