"""The device of the tests of Triton kernels: a GPU, or the CPU with Triton's interpreter."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

DEVICE = torch.device(os.environ.get("PENSTOCK_TEST_DEVICE", "cpu"))
"""Device on which kernel tests run; the fixture `device` returns it."""

ON_GPU = DEVICE.type != "cpu"

DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if ON_GPU else ()))
"""Dtypes to test kernels in. The interpreter computes wrong bfloat16 results without an error."""


def runs_kernels() -> bool:
    """Return True if Triton kernels run on `DEVICE`. The result is constant within a process."""
    return ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"


def _values(operand: Any) -> Any:
    """Return the numbers of an operand of an interpreted product; FP8 is held as bytes."""
    if operand.dtype.primitive_bitwidth > 8 or operand.dtype.is_int():
        return operand.data
    return torch.from_numpy(operand.data).view(torch.float8_e4m3fn).float().numpy()


@contextmanager
def exact_products() -> Iterator[None]:
    """Make interpreted matrix products independent of an element's position in its tile.

    Each element is the sum of its products in the order of the inputs. By default, the interpreter
    uses numpy's matrix product, whose order of sums depends on the position.
    """
    if ON_GPU:
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        wide = d.data.dtype
        left, right = (_values(each).astype(wide) for each in (a, b))
        terms = left[:, :, None] * right[None]
        return TensorHandle(np.add.reduce(terms, axis=1, dtype=wide) + d.data, d.dtype.scalar)

    with mock.patch.object(InterpreterBuilder, "create_dot", dot):
        yield
