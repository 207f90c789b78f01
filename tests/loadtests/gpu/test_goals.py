"""Goals of GPU operations: met, missed, or not comparable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.gpu.bounds import Bounds
from penstock.loadtests.gpu.goals import PLAIN, Goal, Measured

BOUNDS = Bounds(bytes_per_second=4e12, flops_per_second=8e14)


def measured(goal: Goal, seconds: float, **peers: float) -> Measured:
    """Return a measurement of 1 GB and 1 GFLOP. At the device's bounds, this work takes 250 µs."""
    renamed = {PLAIN if name == "plain" else name: value for name, value in peers.items()}
    return Measured("x", goal, 1e9, 1e9, seconds, True, renamed, {})


@pytest.mark.parametrize(
    ("goal", "seconds", "met"),
    [
        (Goal(most_us=300), 299e-6, True),
        (Goal(most_us=300), 301e-6, False),
        (Goal(least_fraction=0.85), 294e-6, True),
        (Goal(least_fraction=0.85), 295e-6, False),
        (Goal(least_tflops=4), 249e-6, True),
        (Goal(least_tflops=4), 251e-6, False),
        (Goal(most_us=300, least_fraction=0.85), 299e-6, False),
    ],
)
def test_goal_is_met_if_all_its_conditions_are(goal: Goal, seconds: float, met: bool) -> None:
    assert measured(goal, seconds).met(BOUNDS) is met


def test_without_bounds_only_times_are_compared() -> None:
    unknown = Bounds.read(None)
    assert measured(Goal(least_fraction=0.85), 1e-6).met(unknown) is None
    assert measured(Goal(most_us=300), 299e-6).met(unknown) is True
    figures = measured(Goal(most_us=300), 299e-6).figures(unknown)
    assert figures["us"] == pytest.approx(299)
    assert figures["share"] != figures["share"]


def test_peer_goal_compares_with_the_fastest_peer_and_not_the_plain_form() -> None:
    goal = Goal(least_of_peer=0.95)
    assert measured(goal, 1.0, slow=5.0, fast=0.96).met(BOUNDS) is True
    assert measured(goal, 1.0, slow=5.0, fast=0.94).met(BOUNDS) is False
    assert measured(goal, 1.0, plain=0.1).met(BOUNDS) is None
    over = Goal(over_plain=8)
    assert measured(over, 1.0, plain=8.1).met(BOUNDS) is True
    assert measured(over, 1.0, plain=7.9).met(BOUNDS) is False
    assert measured(over, 1.0).met(BOUNDS) is None
    # A missed condition decides the result, although another condition cannot be compared.
    assert measured(Goal(most_us=1, least_of_peer=1), 1.0).met(BOUNDS) is False


@given(st.floats(1e-6, 1), st.floats(1e-6, 1))
def test_figures_agree_with_each_other(seconds: float, peer: float) -> None:
    figures = measured(Goal(most_us=300), seconds, peer=peer).figures(BOUNDS)
    assert figures["share"] * figures["us"] == pytest.approx(figures["floor_us"])
    assert figures["floor_us"] == pytest.approx(250)
    assert figures["of_best_peer"] * figures["us"] == pytest.approx(figures["peers_us"]["peer"])
    assert figures["tflops"] == pytest.approx(1e-3 / seconds)


def test_floor_is_the_longer_of_memory_and_compute_time() -> None:
    assert BOUNDS.floor(4e9, 1) == pytest.approx(1e-3)
    assert BOUNDS.floor(1, 8e11) == pytest.approx(1e-3)


def test_goal_is_formatted_as_text() -> None:
    assert str(Goal(most_us=295, least_of_peer=0.95)) == "295 µs or less, 0.95 of the best peer"
