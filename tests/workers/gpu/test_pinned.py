"""Arrays on their way: here, where nothing is pinned, their contents."""

import numpy as np
import torch

from penstock.workers.gpu.pinned import AsyncTokenCopy, put


def test_what_is_put_is_there() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert put(array, torch.device("cpu")).tolist() == array.tolist()


def test_rows_without_a_token_are_told_apart() -> None:
    tokens = torch.tensor([5, 7, 0], dtype=torch.int32)
    found, finite = AsyncTokenCopy(tokens, torch.tensor([True, False, True])).wait()
    assert found.dtype == np.int32
    assert found.tolist() == [5, 0, 0]
    assert finite.tolist() == [True, False, True]
