"""Plans a decode step quickly if it has the same sequences as the previous step.

Most steps of a busy server only add one token to each sequence. The plan of such a step follows
from the previous plan by a few additions. It does not depend on the tokens of the previous step, so
it can be made while that step is running.
"""

import numpy as np

from penstock.workers.scheduling.kv_pool import BlockPool, State
from penstock.workers.scheduling.sequence import Ints, StepOutput, StepPlan
from penstock.workers.scheduling.table import SequenceTable


class DecodeFastPath:
    """Makes the next decode plan from a plan in which every running sequence samples one token."""

    def __init__(self, table: SequenceTable, pool: BlockPool) -> None:
        self._table = table
        self._pool = pool
        self.last: StepPlan | None = None  # the newest plan; None if it cannot be continued
        self._has_snapshot = False  # whether the fields below are valid for `last`
        self._first = 0  # number of the first plan made with the fields below
        self._until = 0  # number of the first plan in which a sequence may end or yield
        self._next_boundary = 0  # number of the next plan in which a sequence enters a new block
        self._filling: set[int] = set()  # numbers of the plans that may fill a block
        self._keys: list[object] = []
        self._choices: Ints = np.zeros(0, np.int32)  # [B] choice numbers
        self._num_prompt: Ints = np.zeros(0, np.int32)  # [B] prompt lengths
        self._stops: Ints = np.zeros((0, 0), np.int32)  # [B, S] stop tokens, padded with -1
        self._no_finishes: Ints = np.zeros(0, np.int32)  # [B] filled with `FinishReason.NONE`

    def invalidate(self) -> None:
        """Forget the last plan, because of a change that `can_continue` cannot detect."""
        self.last, self._has_snapshot = None, False

    def start(self, plan: StepPlan, rows: Ints) -> None:
        """Keep `plan` as the last plan if it computes and samples one token for each of `rows`."""
        self.invalidate()
        if plan.rows is rows and len(plan.tokens) == len(rows) and plan.samples.all():
            self.last = plan

    def can_continue(self, rows: Ints) -> bool:
        """Return True if there is a last plan and its rows are still the running `rows`."""
        return self.last is not None and self.last.rows is rows

    def next(self, number: int, ahead: bool) -> StepPlan | None:
        """Return the next plan; None if a sequence may end in that step or too few blocks are left.

        Args:
            number: number of the new plan.
            ahead: True if the last step is still in flight. Then `StepPlan.fill` sets the tokens of
                the new plan later.
        """
        last = self.last
        if last is None:
            return None
        if not self._has_snapshot:
            self._snapshot_rows(last)
        if last.number >= self._until:
            return None
        slots = last.slots + 1
        tables = last.block_tables
        if last.number + 1 == self._next_boundary:
            (crossing,) = (slots % self._table.block_size == 0).nonzero()
            if not self._grow(last.rows[crossing], last.context_lens[crossing]):
                return None
            tables = self._enter_block(last, crossing, slots)
            self._find_block_boundary(number, slots)
        self.last = StepPlan(
            number=number,
            rows=last.rows,
            tokens=np.zeros_like(slots) if ahead else self._drawn(last),
            positions=last.context_lens,
            query_starts=last.query_starts,
            context_lens=last.context_lens + 1,
            block_tables=tables,
            slots=slots,
            samples=last.samples,
            ahead=ahead,
        )
        return self.last

    @property
    def num_until_boundary(self) -> int:
        """Number of plans, counted from the last one, until a sequence writes to a new block."""
        return 0 if self.last is None else self._next_boundary - self.last.number

    def num_until_limit(self) -> int:
        """Return the number of plans from the last one until a sequence reaches a length limit."""
        if self.last is None:
            return 0
        if not self._has_snapshot:
            self._snapshot_rows(self.last)
        return self._until - self.last.number

    def fills(self, plan: StepPlan) -> bool:
        """Return True if this plan may fill a block.

        Call this once per plan: a second call for the same plan returns False.
        """
        if plan.number not in self._filling:
            return False
        self._filling.remove(plan.number)
        return True

    def commit(self, plan: StepPlan, drawn: Ints) -> StepOutput | None:
        """Commit a plan made by `next` and return its output.

        Return None and change nothing if `plan` was not made by `next` or may end a sequence.
        """
        if not self._has_snapshot or not self._first <= plan.number < self._until:
            return None
        if (self._stops == drawn[:, None]).any():
            return None
        table, rows, lengths = self._table, plan.rows, plan.context_lens
        table.num_computed[rows] = lengths
        table.tokens[rows, lengths] = drawn
        table.num_tokens[rows] = lengths + 1
        indices = lengths - self._num_prompt
        return StepOutput(self._keys, self._choices, rows, indices, drawn, self._no_finishes)

    def _snapshot_rows(self, last: StepPlan) -> None:
        table, rows = self._table, last.rows
        limits = np.minimum(table.max_len[rows], table.yield_len[rows])
        self._first = last.number + 1
        self._until = last.number + int((limits - last.context_lens).min()) - 1
        self._keys = table.keys[rows].tolist()
        self._choices = table.choices[rows]
        self._num_prompt = table.num_prompt[rows]
        self._stops = table.stop_tokens[rows]
        self._no_finishes = np.zeros_like(rows)
        self._has_snapshot = True
        self._filling = set()
        self._find_block_boundary(last.number, last.slots)

    def _find_block_boundary(self, number: int, slots: Ints) -> None:
        """Set the number of the next plan in which a row enters a new block.

        Args:
            number: number of a plan.
            slots: [B] KV slots that this plan writes.
        """
        size = self._table.block_size
        self._next_boundary = number + size - int((slots % size).max())
        self._filling.add(self._next_boundary - 1)

    def _drawn(self, last: StepPlan) -> Ints:
        drawn: Ints = self._table.tokens[last.rows, last.context_lens]
        return drawn

    def _grow(self, rows: Ints, positions: Ints) -> bool:
        """Take the blocks that `rows` need for `positions`; return False if too few are free."""
        table = self._table
        columns = positions // table.block_size
        missing = columns >= table.num_blocks[rows]
        num = int(np.count_nonzero(missing))
        if num > self._pool.num_available:
            return False
        if num:
            rows, columns = rows[missing], columns[missing]
            table.block_table[rows, columns] = self._pool.take(num, State.USED)
            table.num_blocks[rows] = columns + 1
        return True

    def _enter_block(self, last: StepPlan, crossing: Ints, slots: Ints) -> Ints:
        """Move the rows at indices `crossing` into their next block; return block tables [B, M].

        `last.block_tables` is changed in place unless it has too few columns. This is safe even
        while the step of `last` runs, because that step does not read the changed columns.
        """
        table = self._table
        rows, columns = last.rows[crossing], last.context_lens[crossing] // table.block_size
        blocks = table.block_table[rows, columns]
        slots[crossing] = blocks * table.block_size
        tables = last.block_tables
        if columns.max() >= tables.shape[1]:
            return table.block_table[last.rows, : int(columns.max()) + 1]
        tables[crossing, columns] = blocks
        return tables
