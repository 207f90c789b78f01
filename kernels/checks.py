"""Checks of an operation's arguments, and the dtypes that Triton kernels support."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64)

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""Largest finite value of the dtype float8_e4m3fn."""


def check(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    like: Tensor | None = None,
) -> None:
    """Raise ValueError unless a tensor has a shape and dtype that a kernel can read.

    The last dimension of the tensor must be contiguous.

    Args:
        name: name of the tensor in the error message.
        tensor: the tensor.
        shape: for each dimension, the required size, or any string if every size is allowed.
        dtypes: the allowed dtypes.
        like: if given, `tensor` must be on the device of this tensor.
    """
    sizes = tensor.shape
    wrong = len(sizes) != len(shape) or any(
        isinstance(expected, int) and expected != size
        for expected, size in zip(shape, sizes, strict=True)
    )
    if wrong:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name} has shape {list(sizes)}: expected [{expected}]")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name} has dtype {found}: expected {names}")
    if sizes and sizes[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in the last dimension: expected stride 1"
        )
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}: expected {like.device}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is contiguous."""
    if not tensor.is_contiguous():
        strides = list(tensor.stride())
        raise ValueError(f"{name} has strides {strides}: expected a contiguous tensor")
