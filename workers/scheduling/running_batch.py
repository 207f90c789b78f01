"""The sequences that hold a row of the sequence table, and the blocks of these rows."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from penstock.workers.scheduling.beam_groups import BeamGroups
from penstock.workers.scheduling.block_growth import BlockGrowth
from penstock.workers.scheduling.kv_pool import BlockPool, State
from penstock.workers.scheduling.sequence import NEVER, Ints, StepPlan
from penstock.workers.scheduling.table import SequenceTable
from penstock.workers.scheduling.waiting import SequencePhase, SequenceState

_arrival = attrgetter("arrival")


class CachedPrefix(NamedTuple):
    """The cached blocks that hold the KV of a sequence's first tokens.

    Attributes:
        blocks: [n] blocks, in the order of the sequence. Only the first tokens of the last block
            may agree with the sequence; the block is then copied before the sequence writes to it.
        num_tokens: number of leading tokens whose KV these blocks hold.
    """

    blocks: Ints
    num_tokens: int


def split_token_budget(remaining: Ints, decode_lens: Ints, budget: int) -> Ints:
    """Return [B]: how many tokens of a token budget a step computes for each table row.

    Every decoding row gets one token; the budget always suffices for these. The rest of `budget`
    goes first to the forced tokens of decoding rows, then to the other rows. Within each of the two
    groups, earlier rows come first.

    Args:
        remaining: [B] number of uncomputed tokens of each row.
        decode_lens: [B] a row with at most this many uncomputed tokens is decoding.
        budget: maximum number of tokens of the step.
    """
    counts = np.ones(len(remaining), np.int32)
    (more,) = (remaining != 1).nonzero()
    if not more.size:
        return counts
    decodes = remaining[more] <= decode_lens[more]
    num_chunks = len(more) - int(np.count_nonzero(decodes))
    left = max(budget - (len(remaining) - num_chunks), 0)
    # `more` has few rows, and for few rows a Python loop is faster than numpy.
    rows = list(zip(more.tolist(), remaining[more].tolist(), decodes.tolist(), strict=True))
    for row, num, is_decode in rows:
        if is_decode:
            forced = min(left, num - 1)
            counts[row] = 1 + forced
            left -= forced
    for row, num, is_decode in rows:
        if not is_decode:
            counts[row] = chunk = min(left, num)
            left -= chunk
    return counts


class RunningBatch:
    """The sequences that hold a table row; the running ones among them are scheduled."""

    def __init__(self, table: SequenceTable, pool: BlockPool) -> None:
        self._table = table
        self._pool = pool
        self.block_growth = BlockGrowth(table, pool)
        # all sequences with a row, including receiving ones and waiting forks
        self._by_row: dict[int, SequenceState] = {}
        self._running: list[SequenceState] = []  # running sequences, sorted by arrival
        # sequences with a row whose forks still wait for the prompt
        self.fork_parents: list[SequenceState] = []
        self.beams = BeamGroups(table, pool, self.block_growth)
        self.num_receiving = 0  # number of sequences that wait for a KV transfer
        self._rows: Ints | None = None

    @property
    def rows(self) -> Ints:
        """[running] rows of running sequences in scheduling order; a change makes a new array."""
        if self._rows is None:
            self._rows = np.array([ticket.row for ticket in self._running], np.int32)
        return self._rows

    def __len__(self) -> int:
        return len(self._by_row)

    def __contains__(self, row: int) -> bool:
        return row in self._by_row

    @property
    def is_steady(self) -> bool:
        """True if the next commit will start no forks and exchange no blocks between rows."""
        return not self.fork_parents and not self.beams

    @property
    def last(self) -> SequenceState:
        """The youngest running sequence, which is preempted first."""
        return self._running[-1]

    def sequence(self, row: int) -> SequenceState:
        return self._by_row[row]

    # ------------------------------------------------------------ rows

    def assign_row(self, ticket: SequenceState, matched: CachedPrefix) -> None:
        """Give the sequence a table row that begins with the cached blocks `matched`.

        The forks of the sequence also get rows, but are scheduled only after the prompt is
        computed.
        """
        table = self._table
        for one in (ticket, *ticket.forks):
            one.row = table.add(one.new, one.choice, one.tokens, one.yield_len)
            table.prompt_known[one.row] = one.prompt_known
            self._by_row[one.row] = one
        if ticket.forks:
            self.fork_parents.append(ticket)
        if ticket.beams:
            self.beams.add(ticket.beams)
        self._start_row(ticket, matched.blocks, matched.num_tokens)
        if not ticket.new.is_cacheable:
            self.stop_publishing([ticket.row])
        if matched.num_tokens % table.block_size:
            self.block_growth.shared_rows.add(ticket.row)

    def fork_if_due(self, ticket: SequenceState) -> bool:
        """Start the forks of `ticket` if its prompt is computed; return whether it is computed."""
        num_prompt = ticket.new.num_prompt
        if self._table.num_computed[ticket.row] < num_prompt:
            return False
        blocks = self._table.blocks(ticket.row)[: -(-num_prompt // self._table.block_size)]
        for follower in ticket.forks:
            follower.hashes = ticket.hashes[: num_prompt // self._table.block_size]
            self._start_row(follower, blocks, num_prompt)
            self.run(follower)
            self.block_growth.shared_rows.add(follower.row)
        self.block_growth.shared_rows.add(ticket.row)
        self.fork_parents.remove(ticket)
        ticket.forks = []
        if ticket.beams:
            self.beams.started(ticket.beams)
        return True

    def with_forks(self, plan: StepPlan) -> StepPlan:
        """Add to `plan` the forks whose first token is sampled now, from their leaders' logits."""
        if not self.fork_parents:
            return plan
        sampling, table = plan.rows[plan.samples].tolist(), self._table
        forks = [
            (sampling.index(leader.row), follower.row)
            for leader in self.fork_parents
            if leader.row in sampling
            for follower in leader.forks
            if table.num_tokens[follower.row] == leader.new.num_prompt
        ]
        return replace(plan, forks=np.array(forks, np.int32).reshape(-1, 2))

    def remove_fork(self, leader: SequenceState, follower: SequenceState) -> None:
        """Detach a fork from its leader, because it no longer waits for the leader's prompt."""
        leader.forks.remove(follower)
        if not leader.forks and leader.row >= 0:
            self.fork_parents.remove(leader)

    def _start_row(self, ticket: SequenceState, blocks: Ints, num_computed: int) -> None:
        """Use `blocks` (held or cached) for the first `num_computed` positions of the row."""
        table, row = self._table, ticket.row
        self._pool.retain(blocks, State.USED)
        table.set_blocks(row, blocks)
        table.num_published[row] = num_computed // table.block_size
        table.num_computed[row] = num_computed

    def reserve(self, ticket: SequenceState) -> None:
        """Reserve blocks for the positions below `source_len` that a KV transfer will write."""
        ticket.phase = SequencePhase.RECEIVING
        self.num_receiving += 1
        rows = np.array([ticket.row], np.int32)
        counts = self._table.num_missing_blocks(rows, np.array([ticket.source_len], np.int32))
        blocks = self._pool.take(int(counts[0]), State.RESERVED)
        self._table.add_blocks(rows, counts, blocks)

    def reserved(self, ticket: SequenceState) -> Ints:
        """Return the blocks of a receiving sequence that its KV transfer writes."""
        return self._table.blocks(ticket.row)[self._table.num_published[ticket.row] :]

    def run(self, ticket: SequenceState) -> None:
        """Make the sequence schedulable; its reserved blocks, if any, become used."""
        if ticket.phase is SequencePhase.RECEIVING:
            self._pool.move(self.reserved(ticket), State.RESERVED, State.USED)
            self.num_receiving -= 1
        ticket.phase = SequencePhase.RUNNING
        ticket.source_len = 0
        insort(self._running, ticket, key=_arrival)
        self._rows = None

    def release_row(self, ticket: SequenceState, num_kept: int = 0) -> Ints:
        """Release a row and its blocks, but keep and return the first `num_kept` blocks.

        The reserved blocks of a receiving sequence stay reserved.
        """
        table = self._table
        blocks = table.blocks(ticket.row)
        if ticket.phase is SequencePhase.RECEIVING:
            blocks = blocks[: int(table.num_published[ticket.row])]
            self.num_receiving -= 1
        elif ticket.phase is SequencePhase.RUNNING:
            del self._running[bisect_left(self._running, ticket.arrival, key=_arrival)]
            self._rows = None
            self._publish_last(ticket)
        self._pool.release(blocks[num_kept:], State.USED)
        table.remove(ticket.row)
        del self._by_row[ticket.row]
        self.block_growth.shared_rows.discard(ticket.row)
        if ticket.forks:
            self.fork_parents.remove(ticket)
        if ticket.beams:
            self.beams.remove(ticket.beams)
        ticket.row = -1
        return blocks[:num_kept]

    # ------------------------------------------------------------ steps

    def split_budget(self, budget: int) -> Ints:
        """Return [running] how many tokens a step with this budget computes for each of `rows`."""
        rows = self.rows
        remaining = self._table.num_tokens[rows] - self._table.num_computed[rows]
        counts = split_token_budget(remaining, self._table.decode_len[rows], budget)
        if self.beams:
            self.beams.align(rows, remaining, counts)
        return counts

    def num_still_needed(self) -> int:
        """Return how many blocks the sequences with a table row still need for their tokens."""
        rows = np.fromiter(self._by_row, np.int32, len(self._by_row))
        missing = int(self._table.num_missing_blocks(rows, self._table.num_tokens[rows]).sum())
        for leader in self.fork_parents:  # forks share the prompt's full blocks
            shared = leader.new.num_prompt // self._table.block_size
            missing -= shared * len(leader.forks)
        return missing + self.block_growth.num_copies(rows)

    def num_unwritten(self) -> int:
        """Return the number of unwritten KV slots in the blocks of running sequences."""
        rows, table = self.rows, self._table
        return int((table.num_blocks[rows] * table.block_size - table.num_computed[rows]).sum())

    def publish(self, rows: Ints, lengths: Ints) -> None:
        """Publish the full blocks of `rows`; `lengths` are the numbers of computed positions."""
        table, size = self._table, self._table.block_size
        full = lengths // size
        (grown,) = (full > table.num_published[rows]).nonzero()
        if not grown.size:
            return
        rows, full = rows[grown], full[grown]
        blocks: list[int] = []
        hashes: list[bytes] = []
        parents: list[bytes] = []
        contents: list[bytes] = []
        firsts = table.num_published[rows].tolist()
        for row, first, end in zip(rows.tolist(), firsts, full.tolist(), strict=True):
            blocks += table.block_table[row, first:end].tolist()
            chain = self._by_row[row].chain(table.tokens[row], end, size)
            hashes += chain[first:]
            parents += chain[first - 1 : -1] if first else [self._by_row[row].root, *chain[:-1]]
            packed, step = table.tokens[row, first * size : end * size].tobytes(), 4 * size
            contents += [packed[at : at + step] for at in range(0, len(packed), step)]
        self._pool.publish(blocks, hashes, parents, contents)
        table.num_published[rows] = full

    def _publish_last(self, ticket: SequenceState) -> None:
        """Publish the last block of a running sequence if it is filled partly."""
        table, row = self._table, ticket.row
        num_full, num_left = divmod(int(table.num_computed[row]), table.block_size)
        if not num_left or table.num_published[row] != num_full:
            return  # the last block is full, or the row publishes no blocks (`stop_publishing`)
        chain = ticket.chain(table.tokens[row], num_full, table.block_size)
        parent = chain[-1] if chain else ticket.root
        first = num_full * table.block_size
        tokens = table.tokens[row, first : first + num_left]
        self._pool.publish_partial(int(table.block_table[row, num_full]), parent, tokens)

    def stop_publishing(self, rows: Sequence[int]) -> None:
        """Publish no more blocks of `rows`."""
        self._table.num_published[list(rows)] = NEVER

    def holders(self) -> tuple[list[Ints], list[Ints]]:
        """Return used and reserved blocks for `BlockPool.check`: one array of each kind per row."""
        used, reserved = [], []
        for row, ticket in self._by_row.items():
            blocks = self._table.blocks(row)
            receiving = ticket.phase is SequencePhase.RECEIVING
            num_used = int(self._table.num_published[row]) if receiving else len(blocks)
            used.append(blocks[:num_used])
            reserved.append(blocks[num_used:])
        return used, reserved
