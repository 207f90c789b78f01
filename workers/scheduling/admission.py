"""Admission of waiting sequences to the batch."""

from penstock.workers.scheduling.config import SchedulerConfig
from penstock.workers.scheduling.kv_pool import BlockPool
from penstock.workers.scheduling.leases import Leases
from penstock.workers.scheduling.running_batch import RunningBatch
from penstock.workers.scheduling.sequence import Ints
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import SequenceState, WaitingQueue


class Admission:
    """Policy that admits waiting sequences while table rows, blocks and token budget last."""

    def __init__(
        self,
        limits: SchedulerConfig,
        table: SequenceTable,
        pool: BlockPool,
        waiting: WaitingQueue,
        batch: RunningBatch,
        leases: Leases,
    ) -> None:
        self._limits = limits
        self._table = table
        self._pool = pool
        self._waiting = waiting
        self._batch = batch
        self._leases = leases
        self._blocked: tuple[SequenceState, int] | None = (
            None  # last queue head that did not fit, and its number of cached blocks
        )

    def admit(self, budget: int) -> list[list[SequenceState]]:
        """Admit waiting sequences in queue order until table rows, blocks or `budget` run out.

        Args:
            budget: number of tokens left in the budget of the step.

        Returns:
            One list per admitted sequence: the sequence, then its forks.
        """
        admitted: list[list[SequenceState]] = []
        static = self._limits.static
        if static and len(self._batch):
            return admitted
        while self._table.num_free_rows and (ticket := self._waiting.head()) is not None:
            if budget <= 0 and not (static or ticket.source_len):
                break
            if self._table.num_free_rows <= len(ticket.forks):
                break
            matched = self._match_if_fits(ticket)
            if matched is None:
                break
            self._waiting.remove(ticket)
            admitted.append([ticket, *ticket.forks])
            budget -= self._assign_row(ticket, matched)
        return admitted

    def _match_if_fits(self, ticket: SequenceState) -> Ints | None:
        """Return the cached blocks to reuse, or None if the other blocks of `ticket` do not fit.

        Leases are reclaimed only while no sequence has a table row. Otherwise `ticket` waits until
        a running sequence ends and frees its blocks.
        """
        size, batch, pool = self._limits.block_size, self._batch, self._pool
        num_tokens = len(ticket.tokens)
        chain = ticket.chain(ticket.tokens, ticket.num_reusable(size), size)
        if len(batch) and self._is_still_blocked(ticket, chain):
            return None
        kept_free = batch.num_still_needed() + self._limits.watermark * len(batch)
        if len(batch):
            # Also keep blocks for the forks. If the batch is empty, this is not needed: forks
            # without enough blocks are preempted.
            shared = ticket.new.num_prompt // size
            kept_free += sum(-(-len(one.tokens) // size) - shared for one in ticket.forks)
        while True:
            matched = pool.match(chain)
            needed = -(-num_tokens // size) - len(matched) + pool.num_idle(matched)
            if needed + kept_free <= pool.num_available:
                return matched
            if len(batch) or not self._leases.reclaim():
                self._blocked = ticket, len(matched)
                return None

    def _is_still_blocked(self, ticket: SequenceState, chain: list[bytes]) -> bool:
        """Return True if `ticket` did not fit at the last attempt and still cannot fit.

        This check is cheap: it does not match the whole prefix again.
        """
        if self._blocked is None or self._blocked[0] is not ticket:
            return False
        num_matched = self._blocked[1]
        if num_matched < len(chain) and self._pool.has_hash(chain[num_matched]):
            return False
        least = -(-len(ticket.tokens) // self._limits.block_size) - num_matched
        kept_free = self._limits.watermark * len(self._batch)
        return least + kept_free > self._pool.num_available

    def _assign_row(self, ticket: SequenceState, matched: Ints) -> int:
        """Give `ticket` a table row, then run it or reserve the blocks for its KV transfer.

        Return the number of tokens left to compute, or 0 if a KV transfer must end first.
        """
        self._batch.assign_row(ticket, matched)
        have = len(matched) * self._limits.block_size
        if ticket.source_len > have:
            self._batch.reserve(ticket)
            return 0
        self._batch.run(ticket)
        if ticket.forks:
            self._batch.fork_if_due(ticket)
        return len(ticket.tokens) - have
