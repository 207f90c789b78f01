"""ExpertBalance: the busiest expert's tokens relative to the mean, once there are enough tokens."""

import pytest
import torch

from penstock.workers.health.expert_balance import MIN_CHOICES, SECONDS_BETWEEN_READS, ExpertBalance


def test_ratio_is_busiest_over_mean_since_the_last_read() -> None:
    first, second = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    balance, now = ExpertBalance([first, second]), 0.0
    assert balance.ratio(now) == 0.0, "nothing was computed yet"
    first += 100
    second += torch.tensor([400, 0, 0, 0])
    assert balance.ratio(now + 1) == 0.0, "the counts are not read again so soon"
    now += SECONDS_BETWEEN_READS
    assert balance.ratio(now) == pytest.approx((1 + 4) / 2)
    first += torch.tensor([200, 100, 50, 50])
    second += 100
    now += SECONDS_BETWEEN_READS
    assert balance.ratio(now) == pytest.approx((2 + 1) / 2), (
        "choices before the last read do not count"
    )


def test_too_few_choices_are_kept_for_the_next_read() -> None:
    counts = torch.zeros(4, dtype=torch.int64)
    balance, now = ExpertBalance([counts]), 0.0
    counts += torch.tensor([4 * MIN_CHOICES - 1, 0, 0, 0])
    assert balance.ratio(now) == 0.0
    counts[1] += 1
    assert balance.ratio(now + SECONDS_BETWEEN_READS) == pytest.approx(4, rel=0.1)


def test_model_without_experts_has_ratio_zero() -> None:
    assert ExpertBalance([]).ratio(0.0) == 0.0
