"""Gives table rows KV blocks for their next tokens, with copy-on-write of shared blocks."""

import numpy as np

from penstock.workers.scheduling.kv_pool import BlockPool, State
from penstock.workers.scheduling.sequence import NO_PAIRS, Ints
from penstock.workers.scheduling.table import SequenceTable


class BlockGrowth:
    """Takes the blocks that table rows need for their next tokens.

    Attributes:
        shared_rows: table rows whose last block may be shared with another row.
    """

    def __init__(self, table: SequenceTable, pool: BlockPool) -> None:
        self._table = table
        self._pool = pool
        self.shared_rows: set[int] = set()

    def num_missing(self, rows: Ints, counts: Ints) -> int:
        """Return how many blocks must be taken to compute the next `counts` tokens of `rows`."""
        ends = self._table.num_computed[rows] + counts
        missing = int(self._table.num_missing_blocks(rows, ends).sum())
        return missing + (self.num_copies(rows[counts > 0]) if self.shared_rows else 0)

    def grow(self, rows: Ints, counts: Ints) -> Ints:
        """Take the blocks for the next `counts` tokens of `rows`.

        Returns:
            [C, 2] (source, destination) of the blocks to copy before the step, namely shared blocks
            that a row is about to write.
        """
        copies = self._copy_on_write(rows) if self.shared_rows else NO_PAIRS
        missing = self._table.num_missing_blocks(rows, self._table.num_computed[rows] + counts)
        num = int(missing.sum())
        if num:
            self._table.add_blocks(rows, missing, self._pool.take(num, State.USED))
        return copies

    def _begun_shared_blocks(self, rows: Ints) -> tuple[Ints, Ints]:
        """Find the rows whose next token is written to a partly filled block that may be shared.

        Returns:
            [n] these rows, and [n] the column of this block in the block table.
        """
        rows = rows[np.isin(rows, np.fromiter(self.shared_rows, np.int32, len(self.shared_rows)))]
        computed = self._table.num_computed[rows]
        begun = computed % self._table.block_size > 0
        return rows[begun], computed[begun] // self._table.block_size

    def num_copies(self, rows: Ints) -> int:
        """Return how many blocks must be copied before the next tokens of `rows` are written."""
        if not self.shared_rows:
            return 0
        return self._pool.num_copies(self._table.block_table[self._begun_shared_blocks(rows)])

    def release_sources(self, copies: Ints) -> None:
        """Release the source blocks of `copies` [C, 2]; call this after the step has made them."""
        for source in copies[:, :1]:  # one at a time, because a source may occur several times
            self._pool.release(source, State.USED)

    def _copy_on_write(self, rows: Ints) -> Ints:
        """Replace shared blocks that `rows` write next with new ones; return the copies to make.

        The source blocks are held until `release_sources` is called. Otherwise a source could be
        evicted, reserved for a KV transfer and overwritten before the step has copied it.
        """
        shared, columns = self._begun_shared_blocks(rows)
        blocks = self._table.block_table[shared, columns]
        # Take all destinations before releasing a source, so that no source is also a destination.
        own = iter(self._pool.take(self._pool.num_copies(blocks), State.USED))
        copies = []
        for row, column, block in zip(shared, columns, blocks, strict=True):
            if self._pool.is_shared(block):
                copies.append((block, next(own)))
                self._table.block_table[row, column] = copies[-1][1]
                # After the other rows have released the block, the last row keeps it without a
                # copy.
                self._pool.release(block[None], State.USED)
            self.shared_rows.discard(int(row))  # the row's last block is not shared now
        made = np.array(copies, np.int32).reshape(-1, 2)
        for source in made[:, :1]:
            self._pool.retain(source, State.USED)
        return made
