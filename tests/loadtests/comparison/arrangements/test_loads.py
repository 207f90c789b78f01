from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.bench.metrics import Goals
from penstock.loadtests.bench.workload import TraceRow
from penstock.loadtests.comparison.arrangements.loads import (
    ANSWER_WEIGHT,
    PHASES,
    Thinning,
    changing_mix,
    closed_loop,
    thinned_trace,
)

GOALS = Goals(ttft=2000.0, tpot=150.0)


def test_closed_loop_keeps_the_number_of_streams() -> None:
    load = closed_loop(16, 48, 128, 64)
    assert (load.name, load.concurrency, load.goals) == ("16 streams", 16, None)
    assert [one.number for one in load.plan] == list(range(48))
    assert {(one.due, one.input_len, one.output_len) for one in load.plan} == {(0.0, 128, 64)}
    assert closed_loop(1, 8, 128, 64).name == "1 stream"


@given(st.integers(1, 9), st.floats(200, 5000), st.integers(0, 1000))
def test_lengths_of_the_mix_change_with_its_phases(count: int, work: float, seed: int) -> None:
    plan = changing_mix(30.0 * count, 30.0, work, GOALS, seed).plan
    assert [one.number for one in plan] == list(range(len(plan)))
    assert all(before.due <= after.due for before, after in pairwise(plan))
    for one in plan:
        # Subtract a little, because the last request of a phase is due exactly at the phase's end.
        number = max(0, int((one.due - 1e-6) // 30.0))
        at = {number, min(number + 1, count - 1)}
        assert any(
            PHASES[phase % len(PHASES)].inputs.low
            <= one.input_len
            <= PHASES[phase % len(PHASES)].inputs.high
            for phase in at
        )


def test_all_phases_of_the_mix_have_equal_work() -> None:
    plan = changing_mix(30.0 * len(PHASES), 30.0, 2000.0, GOALS, 0).plan
    for number in range(len(PHASES)):
        own = [one for one in plan if number * 30.0 < one.due <= (number + 1) * 30.0]
        work = sum(one.input_len + ANSWER_WEIGHT * one.output_len for one in own)
        assert work / 30.0 == pytest.approx(2000.0, rel=0.1)


def test_same_seed_gives_the_same_mix() -> None:
    assert changing_mix(60.0, 30.0, 900.0, GOALS, 7) == changing_mix(60.0, 30.0, 900.0, GOALS, 7)
    assert changing_mix(60.0, 30.0, 900.0, GOALS, 7) != changing_mix(60.0, 30.0, 900.0, GOALS, 8)


ROWS = st.lists(
    st.tuples(st.floats(0, 1000), st.integers(1, 20_000), st.integers(1, 20_000)), min_size=1
).map(lambda rows: [TraceRow(*row) for row in sorted(rows)])


@given(ROWS, st.integers(1, 8), st.integers(2, 4096))
def test_thinned_requests_fit_the_model(rows: list[TraceRow], divide: int, longest: int) -> None:
    load = thinned_trace(rows, Thinning(1001.0, 1.1, divide, longest), GOALS)
    assert [one.due for one in load.plan] == [row.at for row in rows]
    for one, row in zip(load.plan, rows, strict=True):
        assert 1 <= one.input_len <= -(-row.input_len // divide)
        assert 1 <= one.output_len <= -(-row.output_len // divide)
        assert one.input_len + one.output_len <= longest


def test_trace_is_thinned_by_the_seed_and_ends_at_its_time() -> None:
    rows = [TraceRow(float(at), 400, 40) for at in range(2000)]
    plan = thinned_trace(rows, Thinning(1000.0, 0.1, 4, 4096, seed=3), GOALS).plan
    assert plan == thinned_trace(rows, Thinning(1000.0, 0.1, 4, 4096, seed=3), GOALS).plan
    assert 60 < len(plan) < 140
    assert max(one.due for one in plan) < 1000.0


def test_trace_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(
        ValueError, match="none of the 1 requests in the first 10 s of the trace was kept"
    ):
        thinned_trace([TraceRow(0.0, 1, 1)], Thinning(10.0, 0.0, 1, 10), GOALS)
