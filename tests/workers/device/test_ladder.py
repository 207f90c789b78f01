"""The ladder: every decode that may be captured has the least graph that holds it."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.device.ladder import ROWS, Ladder, Rung
from tests.support.planner import Planner

LADDERS = st.builds(Ladder, st.integers(1, 600), st.integers(1, 1 << 20))


@given(LADDERS, st.integers(1, 600), st.integers(1, 1 << 20))
def test_a_step_takes_the_least_rung_that_holds_it(ladder: Ladder, rows: int, context: int) -> None:
    rungs = ladder.rungs()
    assert rungs == sorted(set(rungs), reverse=True)
    holding = [rung for rung in rungs if rung.rows >= rows and rung.context >= context]
    assert ladder.least(rows, context) == min(holding, default=None)


@given(st.integers(1, 600), st.integers(1, 1 << 20))
def test_whatever_an_engine_can_decode_is_held(sequences: int, model_len: int) -> None:
    ladder = Ladder(sequences, model_len)
    top = min(sequences, ROWS[-1])
    assert ladder.rungs()[0] == Rung(top, model_len)
    for rows in range(1, top + 1):
        rung = ladder.least(rows, model_len)
        assert rung is not None
        padding = rung.rows - rows
        assert padding < max(rows, 2)
        assert padding <= 7
    assert ladder.least(top + 1, 1) is None
    assert ladder.least(1, model_len + 1) is None


def test_graphs_of_long_models_stay_few() -> None:
    assert Ladder(256, 8192).contexts == (8192,)
    assert Ladder(256, 131072).contexts == (8192, 65536, 131072)
    assert len(Ladder(256, 131072).rungs()) == 3 * 35


def test_only_plain_decodes_take_a_graph() -> None:
    ladder = Ladder(8, 64)
    planner = Planner([[1, 2, 3], [4] * 17, [5]], max_new=4)
    assert ladder.rung_for(planner.plan(chunk=1000)) is None
    one_each = planner.plan(chunk=1)
    assert ladder.rung_for(one_each) == Rung(4, 64)
    scored = replace(one_each, scored=np.array([1], np.int32))
    assert ladder.rung_for(scored) is None
    assert Ladder(2, 64).rung_for(one_each) is None
