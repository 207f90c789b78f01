"""The ladder: every decode that may be captured has the least graph that holds it."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.gpu.graph_buckets import ROWS, GraphBucket, GraphBuckets
from tests.support.planner import Planner

LADDERS = st.builds(GraphBuckets, st.integers(1, 600), st.integers(1, 1 << 20))


@given(LADDERS, st.integers(1, 600), st.integers(1, 1 << 20))
def test_a_step_takes_the_least_rung_that_holds_it(
    ladder: GraphBuckets, rows: int, context: int
) -> None:
    rungs = ladder.buckets()
    assert rungs == sorted(set(rungs), reverse=True)
    holding = [rung for rung in rungs if rung.rows >= rows and rung.context >= context]
    assert ladder.smallest(rows, context) == min(holding, default=None)


@given(st.integers(1, 600), st.integers(1, 1 << 20))
def test_whatever_an_engine_can_decode_is_held(sequences: int, model_len: int) -> None:
    ladder = GraphBuckets(sequences, model_len)
    top = min(sequences, ROWS[-1])
    assert ladder.buckets()[0] == GraphBucket(top, model_len)
    for rows in range(1, top + 1):
        rung = ladder.smallest(rows, model_len)
        assert rung is not None
        padding = rung.rows - rows
        assert padding < max(rows, 2)
        assert padding <= 7
    assert ladder.smallest(top + 1, 1) is None
    assert ladder.smallest(1, model_len + 1) is None


def test_graphs_of_long_models_stay_few() -> None:
    assert GraphBuckets(256, 8192).contexts == (8192,)
    assert GraphBuckets(256, 131072).contexts == (8192, 65536, 131072)
    assert len(GraphBuckets(256, 131072).buckets()) == 3 * 35


def test_only_plain_decodes_take_a_graph() -> None:
    ladder = GraphBuckets(8, 64)
    planner = Planner([[1, 2, 3], [4] * 17, [5]], max_new=4)
    assert ladder.bucket_for(planner.plan(chunk=1000)) is None
    one_each = planner.plan(chunk=1)
    assert ladder.bucket_for(one_each) == GraphBucket(4, 64)
    scored = replace(one_each, scored=np.array([1], np.int32))
    assert ladder.bucket_for(scored) is None
    assert GraphBuckets(2, 64).bucket_for(one_each) is None
