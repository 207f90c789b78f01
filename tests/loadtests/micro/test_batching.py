"""Number of steps with static and with continuous batching."""

import random

from penstock.loadtests.micro.batching import num_steps


def test_a_static_batch_takes_as_long_as_its_longest_answer() -> None:
    rng = random.Random(3)
    lengths = [rng.choice([1, 2, 5, 40]) for _ in range(50)]
    batches = [lengths[start : start + 8] for start in range(0, 50, 8)]
    assert num_steps(lengths, 8, static=True) == sum(map(max, batches))


def test_continuous_batching_fills_every_row_while_requests_wait() -> None:
    rng = random.Random(4)
    lengths = [rng.choice([1, 2, 5, 40]) for _ in range(50)]
    steps = num_steps(lengths, 8, static=False)
    assert sum(lengths) / 8 <= steps <= sum(lengths) / 8 + 40
    assert num_steps([7] * 16, 8, static=False) == num_steps([7] * 16, 8, static=True) == 14
