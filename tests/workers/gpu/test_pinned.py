"""Copies between host and device; on a CPU, only the contents are tested, not pinned memory."""

import numpy as np
import torch

from penstock.workers.gpu.pinned import AsyncTokenCopy, put


def test_put_keeps_the_contents() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert put(array, torch.device("cpu")).tolist() == array.tolist()


def test_tokens_of_rows_that_are_not_finite_are_zero() -> None:
    tokens = torch.tensor([5, 7, 0], dtype=torch.int32)
    found, finite = AsyncTokenCopy(tokens, torch.tensor([True, False, True])).wait()
    assert found.dtype == np.int32
    assert found.tolist() == [5, 0, 0]
    assert finite.tolist() == [True, False, True]
