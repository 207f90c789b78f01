"""GraphBuckets: a decode step takes the smallest captured graph that fits."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.gpu.graph_buckets import ROWS, GraphBucket, GraphBuckets
from tests.support.planner import Planner

GRAPH_BUCKETS = st.builds(GraphBuckets, st.integers(1, 600), st.integers(1, 1 << 20), st.booleans())


@given(GRAPH_BUCKETS, st.integers(1, 600), st.integers(1, 1 << 20))
def test_step_takes_the_smallest_bucket_that_fits(
    graph_buckets: GraphBuckets, rows: int, context: int
) -> None:
    every_bucket = graph_buckets.buckets()
    assert every_bucket == sorted(set(every_bucket), reverse=True)
    fitting = [
        bucket for bucket in every_bucket if bucket.rows >= rows and bucket.context >= context
    ]
    assert graph_buckets.smallest(rows, context) == min(fitting, default=None)


@given(st.integers(1, 600), st.integers(1, 1 << 20))
def test_decodes_within_the_limits_fit_a_bucket_with_little_padding(
    sequences: int, model_len: int
) -> None:
    graph_buckets = GraphBuckets(sequences, model_len)
    top = min(sequences, ROWS[-1])
    assert graph_buckets.buckets()[0] == GraphBucket(top, model_len)
    for rows in range(1, top + 1):
        bucket = graph_buckets.smallest(rows, model_len)
        assert bucket is not None
        padding = bucket.rows - rows
        assert padding < max(rows, 2)
        assert padding <= 7
    assert graph_buckets.smallest(top + 1, 1) is None
    assert graph_buckets.smallest(1, model_len + 1) is None


def test_each_number_of_rows_has_one_graph() -> None:
    assert GraphBuckets(256, 131072).contexts == (131072,)
    assert len(GraphBuckets(256, 131072).buckets()) == 35


def test_graphs_for_several_contexts_are_few() -> None:
    assert GraphBuckets(256, 8192, True).contexts == (8192,)
    assert GraphBuckets(256, 131072, True).contexts == (8192, 65536, 131072)
    assert len(GraphBuckets(256, 131072, True).buckets()) == 3 * 35


def test_only_plain_decodes_take_a_graph() -> None:
    graph_buckets = GraphBuckets(8, 64)
    planner = Planner([[1, 2, 3], [4] * 17, [5]], max_new=4)
    assert graph_buckets.bucket_for(planner.plan(chunk=1000)) is None
    one_each = planner.plan(chunk=1)
    assert graph_buckets.bucket_for(one_each) == GraphBucket(4, 64)
    scored = replace(one_each, scored=np.array([1], np.int32))
    assert graph_buckets.bucket_for(scored) is None
    assert GraphBuckets(2, 64).bucket_for(one_each) is None
