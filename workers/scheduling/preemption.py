"""Preemption of running sequences when the KV blocks run out."""

from penstock.workers.scheduling.scheduler_state import SchedulerState
from penstock.workers.scheduling.sequence import Ints, Preempted
from penstock.workers.scheduling.sequence_groups import SequenceGroups
from penstock.workers.scheduling.waiting import SequencePhase, SequenceState


class Preemption:
    """Frees the blocks for the next step: reclaims leases, then preempts running sequences.

    A preempted sequence loses its table row and its blocks. It goes back to the waiting queue and
    is recomputed later, except for the tokens whose blocks are still cached.
    """

    def __init__(self, state: SchedulerState, groups: SequenceGroups) -> None:
        self._state = state
        self._groups = groups
        self._table = state.table
        self._batch = state.batch

    def reclaim_blocks(self, budget: int) -> Ints:
        """Free blocks for the next step of the running sequences: reclaim leases, then preempt.

        Args:
            budget: token budget of the step.

        Returns:
            [running] number of tokens that the step computes for each of `batch.rows`.
        """
        state, batch = self._state, self._batch
        counts = batch.split_budget(budget)
        while batch.block_growth.num_missing(batch.rows, counts) > state.pool.num_available:
            if not state.leases.reclaim():
                ticket = self.preempt()
                state.waiting.push(ticket)
                state.totals.preemptions += 1
                self._groups.events.append(Preempted(ticket.key))
                counts = batch.split_budget(budget)
        return counts

    def preempt(self) -> SequenceState:
        """Take row and blocks from the youngest running sequence.

        Forks of the sequence, or all beams of its beam search, are preempted with it.

        Returns:
            The sequence to queue again. Its `forks` are the other preempted sequences.
        """
        ticket = self._batch.last
        leader, *followers = ticket.beams or (ticket, *ticket.forks)
        for one in (*reversed(followers), leader):  # release the leader after its forks
            self._save(one)
            self._batch.release_row(one)
            one.phase = SequencePhase.AWAITING_FORK
        leader.phase, leader.forks = SequencePhase.WAITING, followers
        return leader

    def _save(self, ticket: SequenceState) -> None:
        """Copy the row's state back into `ticket` before the row is released."""
        table, row = self._table, ticket.row
        ticket.prompt_known = int(table.prompt_known[row])
        ticket.tokens = table.tokens[row, : table.num_tokens[row]].copy()
        if (
            ticket.beams
        ):  # keep only the prompt's hashes, because beams exchange the blocks of their answers
            del ticket.hashes[ticket.new.num_prompt // table.block_size :]
