"""What is tried out before the cache is made."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.gpu.memory_profile import StepLimits, graph_bytes, largest_step

SIZES = st.builds(
    StepLimits,
    st.integers(1, 9),
    st.integers(1, 300),
    st.integers(1, 90),
    st.sampled_from([1, 4, 16]),
)


@given(SIZES)
def test_the_largest_step_is_within_its_sizes_and_fills_them(sizes: StepLimits) -> None:
    plan = largest_step(sizes)
    counts = np.diff(plan.query_starts)
    most = min(sizes.num_tokens, sizes.num_sequences * sizes.model_len)
    assert len(plan.tokens) == len(plan.slots) == len(plan.positions) == counts.sum() == most
    assert counts.max() <= sizes.model_len
    assert (counts == plan.context_lens).all()
    assert (plan.slots < sizes.block_size).all()
    assert plan.block_tables.shape[1] * sizes.block_size >= counts.max()
    assert not plan.block_tables.any()


def test_graphs_take_their_pool_once_and_each_its_own() -> None:
    assert graph_bytes([1000, 700, 690], 35) == 300 + 34 * 10
    assert graph_bytes([1000, 700], 1) == 300
    assert graph_bytes([], 35) == 0  # nothing can be captured
    assert graph_bytes([1000, 1010, 1020], 35) == 0  # others gave memory back meanwhile
