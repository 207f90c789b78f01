"""Preemption of running sequences when the KV blocks run out."""

from penstock.workers.scheduling.kv_pool import BlockPool
from penstock.workers.scheduling.leases import Leases
from penstock.workers.scheduling.running_batch import RunningBatch
from penstock.workers.scheduling.sequence import Ints
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import SequencePhase, SequenceState, WaitingQueue


class Preemption:
    """Frees the blocks for the next step: reclaims leases, then preempts running sequences.

    A preempted sequence loses its table row and its blocks. It goes back to the waiting queue and
    is recomputed later, from cached blocks as far as they still exist.
    """

    def __init__(
        self,
        table: SequenceTable,
        pool: BlockPool,
        waiting: WaitingQueue,
        batch: RunningBatch,
        leases: Leases,
    ) -> None:
        self._table = table
        self._pool = pool
        self._waiting = waiting
        self._batch = batch
        self._leases = leases
        self.num_preempted = 0  # number of preemptions since the start

    def reclaim_blocks(self, budget: int) -> Ints:
        """Free blocks for the next step of the running sequences: reclaim leases, then preempt.

        Args:
            budget: token budget of the step.

        Returns:
            [running] number of tokens that the step computes for each of `batch.rows`.
        """
        batch = self._batch
        counts = batch.split_budget(budget)
        while batch.block_growth.num_missing(batch.rows, counts) > self._pool.num_available:
            if not self._leases.reclaim():
                self._waiting.push(self.preempt())
                self.num_preempted += 1
                counts = batch.split_budget(budget)
        return counts

    def preempt(self) -> SequenceState:
        """Take row and blocks from the youngest running sequence of the lowest priority.

        Forks of the sequence, or all beams of its beam search, are preempted with it.

        Returns:
            The sequence to queue again; its forks, or the other beams of its search, are attached.
        """
        ticket = self._batch.last
        if ticket.beams:
            ticket = self._preempt_beams(ticket.beams)
        else:
            self._save(ticket)
            for follower in ticket.forks:
                self._batch.release_row(follower)
            self._batch.release_row(ticket)
        ticket.phase = SequencePhase.WAITING
        return ticket

    def _preempt_beams(self, beams: list[SequenceState]) -> SequenceState:
        """Release the rows of a search's beams; return the leader, with the others as forks."""
        leader = beams[0]
        for one in reversed(beams):  # release the leader after its forks
            self._save(one)
            self._batch.release_row(one)
            one.phase = SequencePhase.AWAITING_FORK
            # Keep only the prompt's hashes, because beams exchange the blocks of their answers.
            del one.hashes[leader.new.num_prompt // self._table.block_size :]
        leader.forks = beams[1:]
        return leader

    def _save(self, ticket: SequenceState) -> None:
        """Copy the row's state back into `ticket` before the row is released."""
        table, row = self._table, ticket.row
        ticket.prompt_known = int(table.prompt_known[row])
        ticket.tokens = table.tokens[row, : table.num_tokens[row]].copy()
