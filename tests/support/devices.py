"""Where kernels are tested: interpreted on the CPU (`make kernels`), or on a GPU (`make gpu`)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

DEVICE = torch.device(os.environ.get("PENSTOCK_TEST_DEVICE", "cpu"))
"""What the fixture `device` gives."""

ON_GPU = DEVICE.type != "cpu"

DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if ON_GPU else ()))
"""To test kernels in. The interpreter is silently wrong in bfloat16."""


def runs_kernels() -> bool:
    """Whether kernels run on `DEVICE`: what a CPU needs is there from the start, or never."""
    return ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def exact_products() -> Iterator[None]:
    """Within, interpreted products have the same bits at every place of a tile: each is summed
    from its first input to its last. Numpy's, which the interpreter takes else, are not alike."""
    if ON_GPU:
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        wide = d.data.dtype
        terms = a.data.astype(wide)[:, :, None] * b.data.astype(wide)[None]
        return TensorHandle(np.add.reduce(terms, axis=1) + d.data, d.dtype.scalar)

    with mock.patch.object(InterpreterBuilder, "create_dot", dot):
        yield
