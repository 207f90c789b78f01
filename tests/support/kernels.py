"""Helpers for tests of interpreted kernels."""

import torch
from torch import Tensor


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor full of NaN or the smallest integer, so that missing writes are detected."""
    out = torch.empty(shape, dtype=dtype)
    return out.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min)


def close(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Check that `found` equals `expected` (float64), up to a few ulps of `found`'s dtype."""
    assert found.shape == expected.shape
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=4 * eps, atol=4 * eps * scale
    )
