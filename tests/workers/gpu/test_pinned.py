"""Copies between host and device; on a CPU, only the contents are tested, not pinned memory."""

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.workers.gpu.pinned import AsyncTokenCopy, put, usable_cores


def test_put_keeps_the_contents() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert put(array, torch.device("cpu")).tolist() == array.tolist()


def test_tokens_of_rows_that_are_not_finite_are_zero() -> None:
    tokens = torch.tensor([5, 7, 0], dtype=torch.int32)
    found, finite = AsyncTokenCopy(tokens, torch.tensor([True, False, True])).wait()
    assert found.dtype == np.int32
    assert found.tolist() == [5, 0, 0]
    assert finite.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("quota", "cores"), [("50000 100000\n", 0.5), ("max 100000\n", None), (None, None)]
)
def test_usable_cores_respect_the_quota_of_the_cgroup(
    tmp_path: Path, quota: str | None, cores: float | None
) -> None:
    path = tmp_path / "cpu.max"
    if quota is not None:
        path.write_text(quota)
    found = usable_cores(path)
    assert found >= 1 if cores is None else found == cores
