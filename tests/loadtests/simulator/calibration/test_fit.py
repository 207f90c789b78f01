"""The fit of the time model: recovers known parameters, with noise and outliers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loadtests.simulator.calibration.fit import (
    LEAST_SHARING,
    BadCalibration,
    Steps,
    fit_line,
    fit_steps,
    jitter_of,
    predicted_seconds,
    sharing_of,
    with_engine_time,
)
from penstock.loadtests.simulator.model.timing import Timing

TIMING = Timing(
    launch=0.002, sequence=1e-4, token=2e-4, pair=2e-8, weights=0.006, kv_token=1e-7, kv_bytes=1024
)


def grid() -> Steps:
    """Decode steps of several batches and contexts, and prompt steps of several sizes."""
    decodes = [(b, b, b * c, 0) for b in (1, 2, 4, 8, 16, 32) for c in (50, 200, 800, 1600)]
    prompts = [
        (n, 1, start + n, n * (start + n / 2)) for n in (32, 128, 512) for start in (0, 512, 1024)
    ]
    columns = np.array([*decodes, *prompts] * 4, np.float64).T
    steps = Steps(np.zeros(columns.shape[1]), *columns)
    return replace(steps, seconds=predicted_seconds(steps, TIMING))


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_fit_predicts_exact_measurements(seed: int) -> None:
    random = np.random.Generator(np.random.Philox(key=seed))
    timing = Timing(
        launch=random.uniform(1e-4, 0.01),
        sequence=random.uniform(0, 1e-3),
        token=10 ** random.uniform(-5, -3),
        pair=random.uniform(0, 1e-7),
        weights=10 ** random.uniform(-3, -1),
        kv_token=random.uniform(0, 1e-6),
    )
    steps = grid()
    fitted = fit_steps(replace(steps, seconds=predicted_seconds(steps, timing)), Timing())
    assert fitted.mean_error < 1e-3
    assert fitted.total_ratio == pytest.approx(1, abs=1e-3)


def test_fit_recovers_the_parameters_that_the_grid_determines() -> None:
    fitted = fit_steps(grid(), TIMING).timing
    for name in ("sequence", "token", "pair", "kv_token"):
        assert getattr(fitted, name) == pytest.approx(getattr(TIMING, name), rel=0.02)
    assert fitted.launch + fitted.weights == pytest.approx(0.008, rel=0.02)
    assert fitted.kv_bytes == TIMING.kv_bytes


def test_a_pause_of_the_machine_hardly_changes_the_fit() -> None:
    steps, random = grid(), np.random.Generator(np.random.Philox(key=3))
    noisy = steps.seconds * random.normal(1, 0.03, len(steps))
    noisy[5] *= 50
    fitted = fit_steps(replace(steps, seconds=noisy), Timing()).timing
    errors = predicted_seconds(steps, fitted) / steps.seconds - 1
    assert abs(np.median(errors)) < 0.1


def test_mean_of_the_predictions_is_that_of_the_measurements() -> None:
    steps, random = grid(), np.random.Generator(np.random.Philox(key=4))
    noisy = replace(steps, seconds=steps.seconds * (1 + random.exponential(0.3, len(steps))))
    assert fit_steps(noisy, Timing()).total_ratio == pytest.approx(1, abs=0.05)


def test_engine_time_is_taken_from_the_gaps_before_decode_steps() -> None:
    steps = grid()
    decodes = steps.tokens == steps.sequences
    gaps = np.where(decodes, 0.001 + 1e-4 * steps.sequences, 0.5)
    ended = np.cumsum(gaps + steps.seconds)
    with_gaps = with_engine_time(ended, steps)
    added = with_gaps.seconds - steps.seconds
    assert added == pytest.approx(0.001 + 1e-4 * steps.sequences, rel=1e-6)


def test_too_few_steps_are_refused() -> None:
    steps = grid()
    with pytest.raises(BadCalibration, match="3 steps"):
        fit_steps(steps.select(np.arange(len(steps)) < 3), Timing())


def test_line_has_no_negative_parameters() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert fit_line(x, 2 * x + 1) == pytest.approx((1, 2))
    fixed, slope = fit_line(x, 10 - x)
    assert slope == 0
    assert fixed == pytest.approx(7.5, rel=0.1)


@pytest.mark.parametrize("deviation", [0.0, 0.02, 0.2])
def test_jitter_is_the_deviation_of_equal_steps(deviation: float) -> None:
    """An estimate of the deviation from n values has a relative standard error of 1 / sqrt(2 n)."""
    steps = Steps.joined([grid()] * 8)
    random = np.random.Generator(np.random.Philox(key=1))
    factors = np.exp(deviation * random.standard_normal(len(steps)))
    fitted = fit_steps(replace(steps, seconds=steps.seconds * factors), Timing()).timing
    bound = 5 / np.sqrt(2 * len(steps))
    assert fitted.jitter == pytest.approx(deviation, rel=bound, abs=1e-3)


def test_errors_of_the_model_are_not_jitter() -> None:
    steps = grid()
    assert jitter_of(steps, predicted_seconds(steps, TIMING) * (1 + steps.tokens)) < 1e-6


@settings(max_examples=20)
@given(st.just(0.0) | st.floats(LEAST_SHARING + 0.01, 2), st.integers(0, 2**32))
def test_slowdown_by_other_workers_is_fitted_apart_from_the_rest(sharing: float, seed: int) -> None:
    random = np.random.Generator(np.random.Philox(key=seed))
    steps = grid()
    others = random.integers(0, 3, len(steps)).astype(np.float64)
    slowed = replace(steps, seconds=steps.seconds * (1 + sharing * others), others=others)
    fitted = fit_steps(slowed, TIMING)
    assert fitted.timing.sharing == pytest.approx(sharing, abs=1e-6)
    assert fitted.mean_error < 1e-3
    assert fitted.timing.token == pytest.approx(TIMING.token, rel=0.02)


def test_slowdown_is_unknown_without_equal_steps_of_both_kinds() -> None:
    steps = grid()
    always = np.ones(len(steps))
    # Only long steps ran beside other workers, so no two equal steps can be compared.
    apart = (steps.tokens > 16).astype(np.float64)
    for others in (0 * always, always, apart):
        assert sharing_of(replace(steps, others=others)) == 0.0
