import numpy as np
import pytest

from penstock.loadtests.simulator.model.jitter import NUM_FACTORS, StepJitter


def test_factors_of_a_step_do_not_depend_on_how_many_are_drawn_at_once() -> None:
    jitter = StepJitter(0.1, 7, "mixed-1")
    whole = jitter.factors(5, 100)
    assert [jitter.factors(5 + number, 1).item() for number in range(100)] == whole.tolist()


def test_factors_have_mean_one_and_the_given_deviation() -> None:
    factors = StepJitter(0.1, 7, "mixed-1").factors(1, NUM_FACTORS)
    assert factors.mean() == pytest.approx(1)
    # An estimate of the deviation sigma from n values has a standard error of sigma / sqrt(2 n).
    assert np.log(factors).std() == pytest.approx(0.1, rel=5 / np.sqrt(2 * NUM_FACTORS))
    assert len(np.unique(factors)) == NUM_FACTORS


def test_workers_and_seeds_have_different_factors() -> None:
    drawn = [
        StepJitter(0.1, seed, worker).factors(1, 1000)
        for seed, worker in ((7, "mixed-1"), (7, "mixed-2"), (8, "mixed-1"))
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(drawn[one], drawn[other])[0, 1]) < 0.2
