"""DecodeInputs: a step's rows are copied unchanged; padding rows use only the scratch block."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.gpu.inputs import DecodeInputs, packed, padding
from penstock.workers.scheduling.sequence import StepPlan

MAX_ROWS, BLOCK_SIZE, SCRATCH = 12, 4, 99


def decode_plan(contexts: list[int], seed: int) -> StepPlan:
    """Return a decode step whose block numbers are smaller than `SCRATCH`."""
    rng = np.random.default_rng(seed)
    lengths = np.array(contexts, np.int32)
    width = -(-int(lengths.max()) // BLOCK_SIZE)
    tables = rng.permutation(SCRATCH)[: width * len(contexts)].reshape(-1, width).astype(np.int32)
    positions = lengths - 1
    blocks = tables[np.arange(len(contexts)), positions // BLOCK_SIZE]
    return StepPlan(
        number=1,
        rows=np.arange(len(contexts), dtype=np.int32),
        tokens=rng.integers(0, 100, len(contexts)).astype(np.int32),
        positions=positions,
        query_starts=np.arange(len(contexts) + 1, dtype=np.int32),
        context_lens=lengths,
        block_tables=tables,
        slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        samples=np.ones(len(contexts), np.bool_),
    )


PLANS = st.builds(
    decode_plan, st.lists(st.integers(1, 30), min_size=1, max_size=MAX_ROWS), st.integers(0, 9)
)


@given(PLANS, st.data())
def test_rows_equal_the_plan_and_padding_uses_the_scratch_block(
    plan: StepPlan, data: st.DataObject
) -> None:
    count = len(plan.rows)
    num_rows = data.draw(st.integers(count, MAX_ROWS))
    rows = padding(MAX_ROWS, BLOCK_SIZE, SCRATCH)
    (tokens, positions, slots, contexts), tables = packed(plan, rows, num_rows, SCRATCH)
    for found, expected in (
        (tokens, plan.tokens),
        (positions, plan.positions),
        (slots, plan.slots),
        (contexts, plan.context_lens),
        (tables, plan.block_tables),
    ):
        np.testing.assert_array_equal(found[:count], expected)
    assert (tables[count:] == SCRATCH).all()
    assert (slots[count:] // BLOCK_SIZE == SCRATCH).all()
    assert (contexts[count:] == 1).all()
    assert (positions[count:] == 0).all()
    # Later steps reuse the padding rows, so `packed` must not change them.
    np.testing.assert_array_equal(rows, padding(MAX_ROWS, BLOCK_SIZE, SCRATCH))


@given(PLANS, PLANS)
def test_buffers_are_reused_and_keep_nothing_of_the_last_step(
    first: StepPlan, second: StepPlan
) -> None:
    inputs = DecodeInputs(MAX_ROWS, 8, BLOCK_SIZE, SCRATCH, torch.device("cpu"))
    batch = inputs.batch(MAX_ROWS, 30)
    inputs.fill(first, MAX_ROWS, None)
    drawn = torch.arange(len(second.rows)) + 500
    inputs.fill(second, MAX_ROWS, drawn)
    count = len(second.rows)
    assert batch.tokens.tolist() == [*drawn.tolist(), *[0] * (MAX_ROWS - count)]
    assert batch.slots[:count].tolist() == second.slots.tolist()
    assert batch.context_lens[:count].tolist() == second.context_lens.tolist()
    assert batch.query_starts.tolist() == list(range(MAX_ROWS + 1))
    width = second.block_tables.shape[1]
    assert torch.equal(batch.block_tables[:count, :width], torch.from_numpy(second.block_tables))
    assert (batch.block_tables[count:, 0] == SCRATCH).all()
