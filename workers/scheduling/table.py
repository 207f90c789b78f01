"""The sequence table: numpy arrays with one row for each admitted sequence."""

import numpy as np

from penstock.workers.scheduling.sequence import (
    NEVER,
    NO_PAIRS,
    NO_TOKENS,
    Bools,
    FinishReason,
    Ints,
    NewSequence,
    StepPlan,
)

# Plain numbers, because access to an enum member takes longer than the arithmetic.
_STOP, _LENGTH = np.int32(FinishReason.STOP), np.int32(FinishReason.LENGTH)


class SequenceTable:
    """Table of R rows; a row has up to L tokens and M = ceil(L / block_size) blocks.

    Integer arrays are int32. Only the scheduler writes the arrays. The sampler (for the token
    history) and the model runner read them.
    """

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        self.num_rows = num_rows
        self.max_model_len = max_model_len
        self.block_size = block_size
        num_columns = -(-max_model_len // block_size)

        def column() -> Ints:
            return np.zeros(num_rows, np.int32)

        self.tokens: Ints = np.zeros((num_rows, max_model_len), np.int32)  # prompt, then answer
        self.num_tokens = column()
        self.num_prompt = column()
        self.num_computed = column()  # number of positions whose K and V are in the blocks
        self.num_published = column()  # number of leading blocks that are full and published
        self.prompt_known = column()  # first prompt position that needs logprobs; NEVER: none does
        self.min_len = column()  # smallest number of tokens at which a stop token ends the sequence
        self.max_len = column()  # number of tokens at which the sequence ends
        self.yield_len = column()  # number of tokens at which the sequence yields
        self.decode_len = column()  # a row with at most this many uncomputed tokens is decoding
        # [R, S] stop tokens of each row, padded with -1
        self.stop_tokens: Ints = np.full((num_rows, 4), -1, np.int32)
        self.block_table: Ints = np.zeros((num_rows, num_columns), np.int32)
        self.num_blocks = column()
        self.keys = np.full(num_rows, None, object)
        self.choices = column()
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def add(self, new: NewSequence, choice: int, tokens: Ints, yield_len: int) -> int:
        """Give the sequence a free row and return the row's number.

        At least one row must be free. The caller must set the row's blocks.
        """
        row = self._free_rows.pop()
        params = new.params
        self.tokens[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)
        self.num_prompt[row] = new.num_prompt
        self.num_computed[row] = self.num_published[row] = self.num_blocks[row] = 0
        # With a grammar, an answer may end before `min_tokens`; see `MinTokens`.
        min_tokens = 0 if params.structured_outputs is not None else params.min_tokens
        self.min_len[row] = min(new.num_prompt + min_tokens, self.max_model_len)
        limit = params.answer_limit(new.num_prompt, self.max_model_len)
        self.max_len[row] = new.num_prompt + limit
        self.yield_len[row] = yield_len
        self.decode_len[row] = 1
        self._set_stop_tokens(row, params.stop_token_ids)
        if params.use_beam_search:  # only the beam search ends a beam
            self.max_len[row] = NEVER
            self._set_stop_tokens(row, ())
        self.keys[row] = new.key
        self.choices[row] = choice
        return row

    def remove(self, row: int) -> None:
        self.keys[row] = None
        self._free_rows.append(row)

    def blocks(self, row: int) -> Ints:
        """Return a copy of the blocks of a row, [num_blocks], in order."""
        return self.block_table[row, : self.num_blocks[row]].copy()

    def add_blocks(self, rows: Ints, counts: Ints, blocks: Ints) -> None:
        """Append the next `counts[i]` entries of `blocks` to row `rows[i]`, for each i in order."""
        (grown,) = counts.nonzero()
        if len(grown) == 1:  # fast path: usually, only one row grows
            row = int(rows[grown[0]])
            first = int(self.num_blocks[row])
            end = first + len(blocks)
            if end > self.block_table.shape[1]:
                raise IndexError(
                    f"row {row} of the block table has no room for {len(blocks)} more blocks"
                )
            self.block_table[row, first:end] = blocks
            self.num_blocks[row] = end
            return
        columns = self.num_blocks[rows].repeat(counts) + ragged_arange(counts)
        self.block_table[rows.repeat(counts), columns] = blocks
        self.num_blocks[rows] += counts

    def set_blocks(self, row: int, blocks: Ints) -> None:
        """Replace the row's blocks."""
        self.block_table[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)

    def copy_rows(self, rows: Ints, parents: Ints) -> None:
        """Copy tokens and blocks of row `parents[i]` to row `rows[i]`, simultaneously for all i."""
        longest = int(self.num_tokens[parents].max())
        self.tokens[rows, :longest] = self.tokens[parents, :longest]
        self.num_tokens[rows] = self.num_tokens[parents]
        self.block_table[rows] = self.block_table[parents]
        self.num_blocks[rows] = self.num_blocks[parents]
        self.num_computed[rows] = self.num_computed[parents]

    def num_missing_blocks(self, rows: Ints, lengths: Ints) -> Ints:
        """Return [n] how many more blocks each row needs to hold `lengths` [n] positions."""
        needed = (lengths + (self.block_size - 1)) // self.block_size
        missing: Ints = np.maximum(needed - self.num_blocks[rows], 0)
        return missing

    def append(self, rows: Ints, drawn: Ints) -> Ints:
        """Append a sampled token to each row; return [n] values of `FinishReason`."""
        lengths = self.num_tokens[rows]
        self.tokens[rows, lengths] = drawn
        lengths += 1
        self.num_tokens[rows] = lengths
        stopped = (self.stop_tokens[rows] == drawn[:, None]).any(axis=1)
        stopped &= lengths >= self.min_len[rows]
        finishes: Ints = (lengths >= self.max_len[rows]) * _LENGTH
        finishes[stopped] = _STOP
        return finishes

    def scored(self, rows: Ints, counts: Ints, positions: Ints) -> Ints:
        """Return [P] indices of the tokens after which a prompt token with logprobs follows.

        Args:
            rows: [B] table rows of the step.
            counts: [B] number of tokens of each row.
            positions: [T] position of each token in its sequence.
        """
        known = self.prompt_known[rows]
        if known.min(initial=NEVER) == NEVER:
            return NO_TOKENS
        wanted = positions + 1 >= known.repeat(counts)
        wanted &= positions + 1 < self.num_prompt[rows].repeat(counts)
        return np.flatnonzero(wanted).astype(np.int32)

    def record_scored(self, rows: Ints, lengths: Ints) -> None:
        """Advance `prompt_known` of `rows` after their first `lengths` positions are computed."""
        requested = self.prompt_known[rows] != NEVER
        lengths, rows = lengths[requested], rows[requested]
        # Keep the maximum, because a preempted or continued sequence recomputes positions.
        # The logprobs of these positions may be known already.
        known = np.maximum(lengths + 1, self.prompt_known[rows])
        self.prompt_known[rows] = np.where(known < self.num_prompt[rows], known, NEVER)

    def num_prompt_computed(self, plan: StepPlan) -> int:
        """Return how many prompt positions a step computes; call this before its commit."""
        ends = np.minimum(plan.context_lens, self.num_prompt[plan.rows])
        return int(np.maximum(ends - self.num_computed[plan.rows], 0).sum())

    def pack(self, number: int, rows: Ints, counts: Ints, copies: Ints = NO_PAIRS) -> StepPlan:
        """Build the ragged batch of the next `counts[b]` uncomputed tokens of each row."""
        computed = self.num_computed[rows]
        query_starts = np.zeros(len(rows) + 1, np.int32)
        counts.cumsum(out=query_starts[1:])
        tokens, positions, slots = self.token_arrays(rows, counts, computed - query_starts[:-1])
        context_lens = computed + counts
        samples: Bools = context_lens == self.num_tokens[rows]
        return StepPlan(
            number=number,
            rows=rows,
            tokens=tokens,
            positions=positions,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=self.block_table[rows, : int(self.num_blocks[rows].max())],
            slots=slots,
            samples=samples,
            copies=copies,
            scored=self.scored(rows, counts, positions),
        )

    def token_arrays(self, rows: Ints, counts: Ints, offsets: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the tokens, positions and KV slots [T] of the next `counts[b]` tokens of each row.

        Args:
            rows: [B] table rows.
            counts: [B] number of tokens of each row.
            offsets: [B] difference between a token's position and its index in the result.
        """
        indices: Ints = np.arange(int(counts.sum()), dtype=np.int32)
        positions: Ints = offsets.repeat(counts) + indices
        columns: Ints = positions // self.block_size
        blocks = _take(self.block_table, rows, counts, columns)
        slots: Ints = (blocks - columns) * self.block_size + positions
        return _take(self.tokens, rows, counts, positions), positions, slots

    def _set_stop_tokens(self, row: int, stop_tokens: tuple[int, ...]) -> None:
        drawable = [token for token in stop_tokens if 0 <= token <= NEVER]
        missing = len(drawable) - self.stop_tokens.shape[1]
        if missing > 0:
            self.stop_tokens = np.pad(self.stop_tokens, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_tokens[row] = -1
        self.stop_tokens[row, : len(drawable)] = drawable


def _take(table: Ints, rows: Ints, counts: Ints, columns: Ints) -> Ints:
    """Return the entries [T] at `columns` [T]: first `counts[0]` of row `rows[0]`, and so on.

    numpy's `take` with one flat index per entry needs half the time of an index with rows and
    columns.
    """
    if columns.max(initial=-1) >= table.shape[1]:  # a flat index would read the next row
        raise IndexError(
            f"column {columns.max()} is outside of the table, which has {table.shape[1]} columns"
        )
    starts = rows.astype(np.intp) * table.shape[1]
    taken: Ints = table.reshape(-1).take(starts.repeat(counts) + columns)
    return taken


def ragged_arange(counts: Ints) -> Ints:
    """Return `arange(counts[0])`, `arange(counts[1])`, ... concatenated into one array."""
    ends = np.cumsum(counts, dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) - (ends - counts).repeat(counts)
