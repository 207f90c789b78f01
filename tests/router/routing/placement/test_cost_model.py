"""Prefill rates and KV transfer costs, learned from measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.placement.cost_model import (
    CALIBRATED_SECONDS,
    PrefillRate,
    TransferCostModel,
)

SAMPLES = st.lists(
    st.tuples(st.integers(0, 100_000), st.floats(0, 100, allow_subnormal=False)), max_size=30
)


def load(tokens: int, seconds: float, hits: int = 0) -> WorkerLoad:
    return WorkerLoad(
        prompt_tokens_computed=tokens, prompt_seconds=seconds, prompt_tokens_cached=hits
    )


def test_rate_counts_only_work_after_the_first_report() -> None:
    measured = PrefillRate(load(10**6, 1000.0))
    assert (measured.is_calibrated, measured.tokens_per_second, measured.uncached_fraction) == (
        False,
        0.0,
        1.0,
    )
    measured.add(load(10**6 + 3000, 1001.0, hits=1000))
    assert measured.is_calibrated
    assert measured.tokens_per_second == pytest.approx(3000)
    assert measured.uncached_fraction == pytest.approx(0.75)


def test_rate_follows_changes_and_ignores_decode_steps() -> None:
    measured = PrefillRate(WorkerLoad())
    seconds = tokens = 0
    for rate in [1000] * 100 + [4000] * 100:
        seconds, tokens = seconds + 1, tokens + rate
        measured.add(load(tokens, seconds))
        before = measured.tokens_per_second
        measured.add(load(tokens, seconds))  # decode steps add no prompt tokens and no prefill time
        assert measured.tokens_per_second == before
    assert 3900 < measured.tokens_per_second <= 4000


def test_rate_is_not_calibrated_by_a_short_measurement() -> None:
    measured = PrefillRate(WorkerLoad())
    measured.add(load(10, CALIBRATED_SECONDS / 2))
    assert not measured.is_calibrated
    measured.add(load(20, CALIBRATED_SECONDS * 1.1))
    assert measured.is_calibrated


@given(
    st.floats(0, 2),
    st.floats(1e-7, 1e-2),
    st.lists(st.integers(1, 50_000), min_size=3, max_size=40),
)
def test_linear_cost_is_recovered_from_its_samples(
    fixed: float, slope: float, lengths: list[int]
) -> None:
    cost = TransferCostModel()
    for length in lengths:
        cost.add(length, 100 * length, fixed + slope * length)
    for length in {min(lengths), max(lengths)}:
        assert cost.seconds(length) == pytest.approx(fixed + slope * length, rel=1e-3, abs=1e-6)
    assert cost.bytes_per_token == pytest.approx(100)
    if max(lengths) > 1.5 * min(lengths):
        assert cost.fixed_seconds == pytest.approx(fixed, rel=0.01, abs=1e-5 + slope)
        assert cost.bytes_per_second == pytest.approx(100 / slope, rel=0.05)


@given(SAMPLES, st.integers(0, 10**6))
def test_costs_are_non_negative_and_bounded_for_any_samples(
    samples: list[tuple[int, float]], length: int
) -> None:
    cost = TransferCostModel()
    for tokens, seconds in samples:
        cost.add(tokens, 10 * tokens, seconds)
    assert cost.is_calibrated == (len(samples) >= 3 and any(tokens for tokens, _ in samples))
    assert cost.fixed_seconds >= 0
    assert cost.seconds_per_token >= 0
    longest = max((seconds for _, seconds in samples), default=0.0)
    assert cost.fixed_seconds <= longest * 1.0001
    assert cost.seconds(0) <= cost.seconds(length) < float("inf")
