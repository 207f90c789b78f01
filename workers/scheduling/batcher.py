"""The batcher: what each step computes, and what becomes of a sequence between its steps.

There are no phases: every running sequence has tokens that are not computed yet, one (a decode) or
more (a prompt, or everything after a preemption); a step computes some of them within one budget.
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

    One step is in flight (of a pipeline: one a stage), and a second one may be planned behind it
    where that needs none of the first one's tokens. Every verb may be called between `plan` and
    `commit`: what a step in flight works on keeps its row and blocks until that step's commit.
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
        self._fast_path = DecodeFastPath(self.table, self.pool)
        self._in_flight = InFlightSteps(self._batch)
        queues = self.table, self._waiting, self._batch
        self._groups = SequenceGroups(*queues, self._leases, self._in_flight, self._fast_path)
        self._totals = Totals()
        self._stats = SchedulerStats(*components, self._admission, self._in_flight, self._totals)
        self.fast_forward = FastForward(*queues, self._in_flight, self._fast_path, self._totals)

    # ------------------------------------------------------------ coming and going

    def submit(self, new: NewSequence) -> None:
        """Put it in the queue; NeverFits, QueueFull, or ValueError for a key that is taken."""
        if new.key in self._groups or new.key in self._leases:
            raise ValueError(f"sequence {new.key!r} is here already")
        check_fits(new, self.limits)
        if len(self._waiting) >= self.limits.max_queued:
            raise QueueFull(f"{len(self._waiting)} sequences are waiting already: try again later")
        group = make_sequence_states(new, self._totals.submitted + 1)
        self._groups.add(new.key, group)
        self._totals.submitted += len(group)
        self._waiting.push(group[0])

    def drop(self, key: Key) -> None:
        """Let go of it in whatever form it is held, and never speak of it again; unknown: nothing.

        Blocks that a transfer reads or writes are kept until `unpin` or `settled`.
        """
        self._groups.drop(key)

    def drop_choice(self, key: Key, choice: int) -> None:
        """Let go of one choice; `Finished` if it was the last one. Unknown, or a beam: nothing."""
        self._groups.drop_choice(key, choice)

    def finish(self, key: Key) -> None:
        """Its owner has all that it wants of it: let go of it. `Finished`; unknown: nothing."""
        self._groups.finish(key)

    def fail(self, key: Key) -> None:
        """Drop a running sequence whose logits were not finite: its blocks are not for others."""
        for ticket in self._groups.choices(key):
            if ticket.phase is SequencePhase.RUNNING:
                self.pool.forget(self.table.blocks(ticket.row))
        self.drop(key)

    def request_yield(self, key: Key) -> None:
        """Stop it at its next boundary and lease its blocks; unknown: nothing.

        A waiting one has none; a receiving one yields when its transfer has ended. Of several
        choices, and of beams, only blocks of their prompt are kept.
        """
        self._groups.request_yield(key)

    # ------------------------------------------------------------ KV transfer

    def pin(self, key: Key, have: int) -> Ints:
        """A lease's blocks of positions [have, kv_len), to be read until `unpin`; LeaseGone."""
        return self._leases.pin(key, have, self.limits.block_size)

    def unpin(self, key: Key) -> None:
        """A send of this lease is over."""
        self._leases.unpin(key)

    def reserved_blocks(self, key: Key) -> Ints:
        """The blocks reserved for positions [have, source_len); KeyError if it does not receive."""
        ticket = self._groups.receiver(key)
        if ticket is None:
            raise KeyError(key)
        return self._batch.reserved(ticket)

    def transfer_done(self, key: Key) -> None:
        """Every reserved block is written and verified; not receiving (any more): nothing."""
        self._end_receiving(key, arrived=True)

    def transfer_failed(self, key: Key) -> None:
        """Nobody writes, nor will: compute them; not receiving (any more): nothing."""
        self._end_receiving(key, arrived=False)

    def transfer_drained(self, key: Key) -> None:
        """Nobody writes the reserved blocks of a dropped receiver any more; unknown: nothing."""
        self._leases.release_abandoned(key)

    # ------------------------------------------------------------ steps

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None if there is nothing to compute until something else happens.

        Behind a step in flight, None also where the next one needs that step's commit first. What
        is planned behind it may be taken back by `withdraw`. In a pipeline as many steps may be in
        flight as it has stages, and each sequence is in one of them at most.
        `now` [s] is for policies in which waiting has a price; the order served today has none.
        """
        if self.limits.num_stages > 1:
            return self._plan_stage()
        if len(self._in_flight.plans) > 1:
            raise ValueError("two steps are not committed yet")
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
        """Forget the newest step in flight, which nobody has begun to compute."""
        plans = self._in_flight.plans
        if not plans or plan is not plans[-1]:
            raise ValueError("not the newest step in flight")
        if len(plan.copies):
            raise ValueError("it makes copies that are counted on: it has to run")
        plans.pop()
        self._fast_path.invalidate()
        self._in_flight.release_drained()

    def commit(self, plan: StepPlan, drawn: Ints, parents: Ints | None = None) -> StepOutput:
        """Book the first step in flight; `drawn` [S] are the tokens of its drawing rows, in order.

        Where beams are among them: `parents` [S] are the rows that each of these goes on from, a
        beam from one of its search, others from themselves. What beams get is not in the output.
        What has ended or was dropped meanwhile is left out: its token is thrown away.
        """
        plans = self._in_flight.plans
        if not plans or plan is not plans[0]:
            raise ValueError("not the first step in flight")
        drawn = np.asarray(drawn, np.int32)
        if len(drawn) != len(plan.sampling_rows):
            raise ValueError("not a token for each row that draws")
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
        counts = self._admission.reclaim_blocks(budget)
        num_events = len(self._groups.events)
        if self._admit(budget - int(counts.sum())):
            # Choices that fork from cached blocks may want more at once than there was room for.
            counts = self._admission.reclaim_blocks(budget)
            self._groups.forget_preempted(num_events)
        rows = self._batch.rows
        if not counts.all():
            scheduled = counts > 0
            rows, counts = rows[scheduled], counts[scheduled]
        if not rows.size:
            return None
        copies = self._batch.grow(rows, counts)
        plan = self.table.pack(number, rows, counts, copies)
        if self._batch.fork_parents or self._batch.beam_groups:
            # who follows will run after one of the next steps; beams move
            self._fast_path.invalidate()
            return replace(plan, forks=self._batch.plan_forks(plan))
        self._fast_path.start(plan, self._batch.rows)
        return plan

    def _plan_stage(self) -> StepPlan | None:
        """The next step of a pipeline, of sequences that are in no other one."""
        plans, budget = self._in_flight.plans, self.limits.max_batched_tokens
        if len(plans) >= self.limits.num_stages:
            return None
        if not plans:  # nobody loses blocks that a step works on
            self._admission.reclaim_blocks(budget)
        self._admit(budget)
        number = self._totals.steps + 1
        if not self._batch.beam_groups:
            plan = self._plan_idle_rows(number)
        else:  # beams change places: no other step may be under way
            plan = None if plans else self._plan_from_tables(number)
        if plan is not None:
            self._totals.steps = number
            plans.append(plan)
        return plan

    def _plan_idle_rows(self, number: int) -> StepPlan | None:
        """A stage's part of those who are idle."""
        rows, counts = self._batch.split_budget_over_idle(self._in_flight.plans, self.limits)
        if not rows.size or self._batch.num_missing(rows, counts) > self.pool.num_available:
            return None
        copies = self._batch.grow(rows, counts)
        plan = self.table.pack(number, rows, counts, copies)
        return (
            replace(plan, forks=self._batch.plan_forks(plan)) if self._batch.fork_parents else plan
        )

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
        output = self._output(drawing, indices, drawn, finishes)
        ended = drawing[finishes != FinishReason.NONE].tolist()
        for row in ended:
            self._groups.finish_row(row)
        for row in due.tolist():
            # With one choice of a sequence the others yield.
            if row not in ended and row in self._batch:
                self._groups.yield_if_due(self._batch.sequence(row).key)
        return output

    def _output(self, rows: Ints, indices: Ints, tokens: Ints, finishes: Ints) -> StepOutput:
        """What the world is told: beams are for their search alone."""
        table = self.table
        if self._batch.beam_groups:
            visible = ~table.is_beam[rows]
            rows, indices, tokens, finishes = (
                each[visible] for each in (rows, indices, tokens, finishes)
            )
        keys = table.keys[rows].tolist()
        return StepOutput(keys, table.choices[rows], rows, indices, tokens, finishes)

    # ------------------------------------------------------------ what others see

    def events(self) -> list[SchedulerEvent]:
        """What has happened since the last call, in order."""
        events, self._groups.events = self._groups.events, []
        return events

    def load(self) -> WorkerLoad:
        """How full it is now, and totals since the start."""
        return self._stats.load()

    def exclude_from_totals(self, num_prompt: int) -> None:
        """Take so many computed prompt tokens off the totals: nobody had asked for them."""
        self._totals.computed -= num_prompt

    def check(self) -> None:
        """AssertionError if the ledger does not balance: every hold on a block has its holder."""
        self._stats.check(self._groups.sequences())

    def debug_state(self) -> dict[str, Any]:
        """Who is here, who has which blocks, what is computed: all but what is said."""
        return self._stats.debug_state(self._groups.sequences())

    # ------------------------------------------------------------ boundaries

    def _admit(self, budget: int) -> bool:
        admitted = self._admission.admit(budget)
        for ticket, *followers in admitted:
            have = int(self.table.num_computed[ticket.row])
            if ticket.is_cancelled and not ticket.forks:
                # Dropped while it waited; its followers forked from cached blocks just now.
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
        """Let those who follow go on where their prompt is computed; who of the rows [n] draws."""
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
