"""Admission of waiting sequences to the batch."""

import numpy as np

from penstock.workers.scheduling.running_batch import CachedPrefix
from penstock.workers.scheduling.scheduler_state import SchedulerState
from penstock.workers.scheduling.sequence import Admitted, Ints, Reserved
from penstock.workers.scheduling.sequence_groups import SequenceGroups
from penstock.workers.scheduling.waiting import SequencePhase, SequenceState


class Admission:
    """Policy that admits waiting sequences until table rows, blocks or the token budget run out."""

    def __init__(self, state: SchedulerState, groups: SequenceGroups) -> None:
        self._limits = state.limits
        self._table = state.table
        self._pool = state.pool
        self._waiting = state.waiting
        self._batch = state.batch
        self._leases = state.leases
        self._totals = state.totals
        self._groups = groups
        self._blocked: tuple[SequenceState, int] | None = (
            # the queue's head that did not fit at the last attempt, and its number of cached blocks
            None
        )

    def admit(self, budget: int) -> bool:
        """Admit waiting sequences in queue order until table rows, blocks or `budget` run out.

        Args:
            budget: number of tokens left in the budget of the step.

        Returns:
            True if a sequence was admitted.
        """
        admitted: list[list[SequenceState]] = []  # sequences, each followed by its forks
        static = self._limits.static
        if static and len(self._batch):
            return False
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
        for ticket, *followers in admitted:
            self._record(ticket, followers)
        return bool(admitted)

    def _record(self, ticket: SequenceState, followers: list[SequenceState]) -> None:
        """Emit the events of an admitted sequence, and count its cached tokens."""
        groups, have = self._groups, int(self._table.num_computed[ticket.row])
        if ticket.is_cancelled and not ticket.forks:
            # The sequence was cancelled while it waited. Its forks have started and no longer need
            # its prompt, so it can end.
            self._batch.release_row(ticket)
            groups.choice_ended(ticket)
        else:
            followers.insert(0, ticket)
        num_cached = min(have, ticket.new.num_prompt)
        groups.events += [Admitted(one.key, one.row, one.choice, num_cached) for one in followers]
        self._totals.cached += num_cached
        if ticket.phase is SequencePhase.RECEIVING:
            blocks = self._batch.reserved(ticket)
            groups.events.append(Reserved(ticket.key, have, ticket.source_len, blocks))

    def _match_if_fits(self, ticket: SequenceState) -> CachedPrefix | None:
        """Return the cached prefix to reuse, or None if too few blocks are free for `ticket`.

        Leases are reclaimed only while no sequence has a table row. Otherwise `ticket` waits until
        a running sequence ends and frees its blocks.
        """
        size, batch, pool = self._limits.block_size, self._batch, self._pool
        num_tokens = len(ticket.tokens)
        chain = ticket.chain(ticket.tokens, ticket.num_reusable // size, size)
        if len(batch) and self._is_still_blocked(ticket, chain):
            return None
        kept_free = batch.num_still_needed() + self._limits.watermark * len(batch)
        if len(batch):
            # Keep blocks free for the forks of `ticket`, too. An empty batch does not need this,
            # because forks without enough blocks are preempted.
            shared = ticket.new.num_prompt // size
            kept_free += sum(-(-len(one.tokens) // size) - shared for one in ticket.forks)
        while True:
            matched = pool.published.match(chain)
            needed = -(-num_tokens // size) - len(matched) + pool.num_idle(matched)
            if needed + kept_free <= pool.num_available:
                unused = pool.num_available - needed - kept_free
                return self._with_begun_block(ticket, matched, unused)
            if len(batch) or not self._leases.reclaim():
                self._blocked = ticket, len(matched)
                return None

    def _with_begun_block(self, ticket: SequenceState, matched: Ints, unused: int) -> CachedPrefix:
        """Extend `matched` by a cached block that begins with the next tokens of `ticket`, if any.

        The cached block is held until it has been copied into a block that `ticket` needs anyway.
        If the cached block has no holder yet, it counts as one of the `unused` (available) blocks.
        """
        size = self._limits.block_size
        have = len(matched) * size
        if ticket.source_len > have:  # a KV transfer must begin at a block boundary
            return CachedPrefix(matched, have)
        parent = ticket.hashes[len(matched) - 1] if len(matched) else ticket.root
        end = min(ticket.num_reusable, have + size - 1)
        begun, length = self._pool.published.match_begun(parent, ticket.tokens[have:end])
        if self._pool.num_idle(begun) > unused:
            return CachedPrefix(matched, have)
        return CachedPrefix(np.concatenate((matched, begun)), have + length)

    def _is_still_blocked(self, ticket: SequenceState, chain: list[bytes]) -> bool:
        """Return True if `ticket` did not fit at the last attempt and still cannot fit.

        This check is cheap: it does not match the whole prefix again.
        """
        if self._blocked is None or self._blocked[0] is not ticket:
            return False
        num_matched = self._blocked[1]
        if num_matched < len(chain) and self._pool.published.has_hash(chain[num_matched]):
            return False
        least = -(-len(ticket.tokens) // self._limits.block_size) - num_matched
        kept_free = self._limits.watermark * len(self._batch)
        return least + kept_free > self._pool.num_available

    def _assign_row(self, ticket: SequenceState, matched: CachedPrefix) -> int:
        """Give `ticket` a table row, then run it or reserve the blocks for its KV transfer.

        Return the number of tokens left to compute, or 0 if a KV transfer must end first.
        """
        self._batch.assign_row(ticket, matched)
        have = matched.num_tokens
        if ticket.source_len > have:
            self._batch.reserve(ticket)
            return 0
        self._batch.run(ticket)
        if ticket.forks:
            self._batch.fork_if_due(ticket)
        return len(ticket.tokens) - have
