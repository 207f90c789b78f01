"""What work and KV transfers cost, learned from measurements."""

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


def test_a_speed_counts_from_when_the_worker_was_met() -> None:
    speed = PrefillRate(load(10**6, 1000.0))
    assert (speed.is_calibrated, speed.tokens_per_second, speed.uncached_fraction) == (
        False,
        0.0,
        1.0,
    )
    speed.add(load(10**6 + 3000, 1001.0, hits=1000))
    assert speed.is_calibrated
    assert speed.tokens_per_second == pytest.approx(3000)
    assert speed.uncached_fraction == pytest.approx(0.75)


def test_a_speed_follows_what_changes_and_is_not_moved_by_decodes() -> None:
    speed = PrefillRate(WorkerLoad())
    seconds = tokens = 0
    for rate in [1000] * 100 + [4000] * 100:
        seconds, tokens = seconds + 1, tokens + rate
        speed.add(load(tokens, seconds))
        before = speed.tokens_per_second
        speed.add(load(tokens, seconds))  # a step without prompts
        assert speed.tokens_per_second == before
    assert 3900 < speed.tokens_per_second <= 4000


def test_a_moment_s_work_is_no_measurement() -> None:
    speed = PrefillRate(WorkerLoad())
    speed.add(load(10, CALIBRATED_SECONDS / 2))
    assert not speed.is_calibrated
    speed.add(load(20, CALIBRATED_SECONDS * 1.1))
    assert speed.is_calibrated


@given(
    st.floats(0, 2),
    st.floats(1e-7, 1e-2),
    st.lists(st.integers(1, 50_000), min_size=3, max_size=40),
)
def test_a_line_is_found_again(fixed: float, slope: float, lengths: list[int]) -> None:
    price = TransferCostModel()
    for length in lengths:
        price.add(length, 100 * length, fixed + slope * length)
    for length in {min(lengths), max(lengths)}:
        assert price.seconds(length) == pytest.approx(fixed + slope * length, rel=1e-3, abs=1e-6)
    assert price.bytes_per_token == pytest.approx(100)
    if max(lengths) > 1.5 * min(lengths):
        assert price.fixed_seconds == pytest.approx(fixed, rel=0.01, abs=1e-5 + slope)
        assert price.bytes_per_second == pytest.approx(100 / slope, rel=0.05)


@given(SAMPLES, st.integers(0, 10**6))
def test_whatever_was_measured_a_price_is_none_or_makes_sense(
    samples: list[tuple[int, float]], length: int
) -> None:
    price = TransferCostModel()
    for tokens, seconds in samples:
        price.add(tokens, 10 * tokens, seconds)
    assert price.is_calibrated == (len(samples) >= 3 and any(tokens for tokens, _ in samples))
    assert price.fixed_seconds >= 0
    assert price.seconds_per_token >= 0
    longest = max((seconds for _, seconds in samples), default=0.0)
    assert price.fixed_seconds <= longest * 1.0001
    assert price.seconds(0) <= price.seconds(length) < float("inf")
