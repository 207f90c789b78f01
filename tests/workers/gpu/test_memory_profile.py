"""The memory profile measures the largest step and the graphs before the cache is allocated."""

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
def test_largest_step_reaches_its_limits(sizes: StepLimits) -> None:
    plan = largest_step(sizes)
    counts = np.diff(plan.query_starts)
    most = min(sizes.num_tokens, sizes.num_sequences * sizes.model_len)
    assert len(plan.tokens) == len(plan.slots) == len(plan.positions) == counts.sum() == most
    assert counts.max() <= sizes.model_len
    assert (counts == plan.context_lens).all()
    assert (plan.slots < sizes.block_size).all()
    assert plan.block_tables.shape[1] * sizes.block_size >= counts.max()
    assert not plan.block_tables.any()


def test_graph_bytes_are_the_shared_pool_and_the_cost_of_each_graph() -> None:
    assert graph_bytes([1000, 700, 690], 35) == 300 + 34 * 10
    assert graph_bytes([1000, 700], 1) == 300
    assert graph_bytes([], 35) == 0  # no graph was captured
    assert graph_bytes([1000, 1010, 1020], 35) == 0  # another process freed memory
