"""The history of latencies and throughput: quantiles, intervals and bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.sampling_params import SamplingParams
from penstock.router.observability.explanations import Explanations
from penstock.router.observability.history import (
    NUM_SAMPLES,
    SAMPLE_SECONDS,
    History,
    quantile,
)
from penstock.router.observability.request_metrics import FIRST_BOUNDS, Histogram, RequestMetrics
from penstock.router.requests.open_requests import OpenRequests
from penstock.router.routing import events as ev
from tests.support.columns import NewToken, columns_of
from tests.support.silent_output import silent_output


@given(
    values=st.lists(st.floats(0, FIRST_BOUNDS[-1]), min_size=1),
    fraction=st.sampled_from([0.5, 0.95]),
)
def test_quantile_is_in_the_bucket_of_the_exact_quantile(
    values: list[float], fraction: float
) -> None:
    histogram = Histogram(FIRST_BOUNDS)
    for value in values:
        histogram.add(value)
    exact = sorted(values)[max(-(-int(fraction * 100) * len(values) // 100) - 1, 0)]
    upper = next(bound for bound in FIRST_BOUNDS if exact <= bound)
    lower = max([0.0, *(bound for bound in FIRST_BOUNDS if bound < exact)])
    found = quantile(FIRST_BOUNDS, histogram.counts, fraction)
    assert found is not None
    assert lower <= found <= upper


def test_quantile_of_nothing_and_beyond_the_last_bound() -> None:
    assert quantile((1.0, 2.0), [0, 0, 0], 0.5) is None
    assert quantile((1.0, 2.0), [0, 0, 5], 0.5) == 2.0


def test_sample_counts_what_happened_in_its_interval() -> None:
    metrics = RequestMetrics({})
    history = History(metrics, 100.0)
    requests = OpenRequests(metrics, Explanations({}, "cost"))
    requests.open(ev.Request(1, [7], SamplingParams()), silent_output(), 100.0)
    for position, moment in enumerate((100.4, 100.45, 100.5)):
        requests.deliver(columns_of([NewToken(1, 1, 0, position, 5)]), moment)
    history.update(100.0 + SAMPLE_SECONDS - 0.1)
    assert not history.samples
    history.update(100.0 + SAMPLE_SECONDS)
    (sample,) = history.samples
    assert sample.tokens_per_second == pytest.approx(3 / SAMPLE_SECONDS)
    assert sample.requests_per_second == pytest.approx(1 / SAMPLE_SECONDS)
    assert sample.ttft_p50 is not None
    assert 0.2 < sample.ttft_p50 <= 0.5
    assert sample.tpot_p95 is not None
    assert 0.03 < sample.tpot_p95 <= 0.075
    history.update(100.0 + 2 * SAMPLE_SECONDS)
    assert history.samples[-1] == (2, None, None, None, None, 0.0, 0.0)


def test_sample_counts_the_tokens_of_all_choices() -> None:
    metrics = RequestMetrics({})
    history = History(metrics, 100.0)
    requests = OpenRequests(metrics, Explanations({}, "cost"))
    requests.open(ev.Request(1, [7], SamplingParams(), num_choices=4), silent_output(4), 100.0)
    for position, moment in enumerate((100.4, 100.5, 100.6)):
        tokens = [NewToken(1, 1, choice, position, 5) for choice in range(4)]
        requests.deliver(columns_of(tokens), moment)
    history.update(100.0 + SAMPLE_SECONDS)
    (sample,) = history.samples
    assert sample.tokens_per_second == pytest.approx(4 * 3 / SAMPLE_SECONDS)
    assert sample.requests_per_second == pytest.approx(1 / SAMPLE_SECONDS)


def test_samples_are_bounded() -> None:
    history = History(RequestMetrics({}), 0.0)
    for number in range(NUM_SAMPLES + 5):
        history.update((number + 1) * SAMPLE_SECONDS)
    assert len(history.samples) == NUM_SAMPLES
    assert history.samples[-1].number == NUM_SAMPLES + 5
