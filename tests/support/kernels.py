"""What tests of interpreted kernels share."""

import torch
from torch import Tensor


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that shows where nothing was written: NaN, or the least integer there is."""
    out = torch.empty(shape, dtype=dtype)
    return out.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min)


def close(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """`found` is as near to `expected` (float64) as its dtype lets sums of unit size be."""
    assert found.shape == expected.shape
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=4 * eps, atol=4 * eps * scale
    )


DTYPES = (torch.float32, torch.float16)
"""What the interpreter computes rightly."""
