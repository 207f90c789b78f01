from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.bench.metrics import (
    Goals,
    Outcome,
    Summary,
    figures,
    peak_concurrent,
    peak_output,
)


def outcome(start: float, arrivals: list[float], output_len: int, **others: object) -> Outcome:
    made = Outcome(0, start, 10, output_len, start=start, arrivals=arrivals, output_len=output_len)
    made.counts = [1] * len(arrivals)
    return replace(made, **others)  # type: ignore[arg-type]


# A request sent at 1.0 s, with tokens at 1.5, 1.6, 1.8 and 2.0 s.
STEADY = outcome(1.0, [1.5, 1.6, 1.8, 2.0], 4)
# A request sent at 2.0 s, with 3 tokens at 2.2 s and 2 tokens at 3.2 s.
LUMPY = outcome(2.0, [2.2, 3.2], 5, counts=[3, 2], requested_len=6)
SINGLE = outcome(0.0, [0.25], 1)
FAILED = outcome(0.5, [0.6], 0, error="gone", released=0.75)


def test_metrics_of_one_request_match_hand_computed_values() -> None:
    assert STEADY.ttft == pytest.approx(0.5)
    assert STEADY.latency == pytest.approx(1.0)
    assert STEADY.gaps == pytest.approx([0.1, 0.2, 0.2])
    assert STEADY.tpot == pytest.approx(0.5 / 3)
    # TPOT: time from the first to the last token, divided by the number of tokens after the first.
    assert LUMPY.tpot == pytest.approx(1.0 / 4)
    assert LUMPY.gaps == pytest.approx([1.0])  # gaps are measured between messages
    assert (SINGLE.tpot, SINGLE.gaps) == (0.0, [])


def test_figures_of_a_load_match_hand_computed_values() -> None:
    made = figures([STEADY, LUMPY, SINGLE, FAILED], duration=4.0)
    assert (made.completed, made.failed, made.short) == (3, 1, 1)
    assert (made.total_input, made.total_output) == (30, 10)
    assert made.per_second(made.total_output) == 2.5
    assert made.ttft.mean == pytest.approx(1000 * (0.5 + 0.2 + 0.25) / 3)
    assert made.ttft.median == pytest.approx(250)
    # SINGLE has one token, so it has no TPOT.
    assert made.tpot.mean == pytest.approx(1000 * (0.5 / 3 + 0.25) / 2)
    assert made.itl.mean == pytest.approx(1000 * (0.1 + 0.2 + 0.2 + 1.0) / 4)
    assert made.itl.median == pytest.approx(200)
    assert made.e2el.mean == pytest.approx(1000 * (1.0 + 1.2 + 0.25) / 3)
    # A request that begins at 2.0 s does not overlap a request that ends at 2.0 s.
    assert made.peak_concurrent == 1
    assert made.good is None
    assert made.lag.p99 == pytest.approx(np.percentile([0, 0, 0, 250], 99))


def test_p99_interpolates_as_numpy_does() -> None:
    made = Summary.of([n / 1000 for n in range(101)])
    assert (made.mean, made.median, made.p90, made.p99) == pytest.approx((50, 50, 90, 99))
    assert made.std == pytest.approx(np.std(np.arange(101)))


def test_figures_without_completed_requests_are_zero() -> None:
    made = figures([FAILED], duration=2.0, goals=Goals(ttft=1))
    assert (made.completed, made.failed, made.good) == (0, 1, 0)
    assert made.ttft == made.itl == Summary(0, 0, 0, 0, 0)
    assert (made.peak_output, made.peak_concurrent) == (0, 0)
    assert figures([], duration=0.0).per_second(3) == 0


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        (Goals(ttft=500), 3),
        (Goals(ttft=499), 2),
        (Goals(tpot=200), 2),  # SINGLE has no TPOT, so it meets every TPOT goal
        (Goals(tpot=200, ttft=250), 1),
        (Goals(e2el=1000), 2),
        (Goals(ttft=0, tpot=0, e2el=0), 0),
    ],
)
def test_goodput_counts_requests_that_meet_all_goals(goals: Goals, good: int) -> None:
    assert figures([STEADY, LUMPY, SINGLE, FAILED], 4.0, goals).good == good


def test_peak_output_counts_tokens_not_messages() -> None:
    # From 0.0 s on, the numbers of tokens in each second are 1, 3, 4 and 2.
    assert peak_output([STEADY, LUMPY, SINGLE]) == 4


def test_peak_output_needs_no_memory_for_seconds_without_tokens() -> None:
    late = outcome(1e12, [1e12 + 0.1, 1e12 + 0.2], 2)
    assert peak_output([STEADY, LUMPY, SINGLE, late]) == 4


def test_uncounted_tokens_are_divided_among_their_messages() -> None:
    partly_counted = outcome(0.0, [0.1, 0.2, 0.3], 7, counts=[None, 1, None])
    assert partly_counted.tokens_per_message() == [3.0, 1.0, 3.0]


spans = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 9)).map(lambda s: (s[0], s[0] + s[1])), max_size=12
)


@given(spans)
def test_peak_concurrent_is_the_most_at_any_time(times: list[tuple[int, int]]) -> None:
    done = [outcome(start, [end], 1) for start, end in times]
    under_way = [sum(start <= t < end for start, end in times) for t in range(30)]
    assert peak_concurrent(done) == max(under_way)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 50),
            st.lists(st.tuples(st.floats(0.001, 3), st.integers(1, 5)), min_size=1, max_size=10),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_totals_and_peaks_are_consistent(
    requests: list[tuple[float, list[tuple[float, int]]]],
) -> None:
    done = []
    for start, messages in requests:
        arrivals = list(start + np.cumsum([gap for gap, _ in messages]))
        counts: list[int | None] = [count for _, count in messages]
        total = sum(count for _, count in messages)
        done.append(outcome(start, arrivals, total, counts=counts))
    made = figures(done, duration=100.0)
    assert made.total_output == sum(o.output_len for o in done)
    assert made.total_output / (made.total_output + 100) <= made.peak_output <= made.total_output
    assert made.peak_concurrent <= len(done)
    for one in done:
        assert one.ttft + sum(one.gaps) == pytest.approx(one.latency)
