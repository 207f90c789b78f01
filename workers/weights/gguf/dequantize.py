"""Converts blocks of GGUF's types to float32, as `dequantize_row_*` of ggml-quants.c does.

Each function takes blocks [n, bytes of a block] as uint8 and returns their items [n, items of a
block] as float32. The order of operations is that of ggml, so that results are bitwise equal.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from penstock.common.gguf.tensor_types import BY_NAME
from penstock.workers.weights.gguf.k_quants import K_QUANTS, as_float, bits, nibbles


def dequantize(blocks: Tensor, dtype: str) -> Tensor:
    """Return the items of blocks.

    Args:
        blocks: [n, bytes of a block], uint8, on any device.
        dtype: Name of the type, a key of `DEQUANTIZE`.

    Returns:
        [n, items of a block], float32.
    """
    assert blocks.shape[1] == BY_NAME[dtype].block_bytes
    return DEQUANTIZE[dtype](blocks)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float32)


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.bfloat16).float()


def _q8_0(blocks: Tensor) -> Tensor:
    """Return scale * q, with q in int8."""
    return blocks[:, 2:].view(torch.int8).float() * as_float(blocks[:, :2])


def _q4_0(blocks: Tensor) -> Tensor:
    """Return scale * (q - 8), with q of 4 bits."""
    return (nibbles(blocks[:, 2:]).float() - 8.0) * as_float(blocks[:, :2])


def _q4_1(blocks: Tensor) -> Tensor:
    """Return scale * q + minimum, with q of 4 bits."""
    return nibbles(blocks[:, 4:]).float() * as_float(blocks[:, :2]) + as_float(blocks[:, 2:4])


def _q5_0(blocks: Tensor) -> Tensor:
    """Return scale * (q - 16), with q of 5 bits."""
    q = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    return (q.float() - 16.0) * as_float(blocks[:, :2])


def _q5_1(blocks: Tensor) -> Tensor:
    """Return scale * q + minimum, with q of 5 bits."""
    q = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    return q.float() * as_float(blocks[:, :2]) + as_float(blocks[:, 2:4])


def _five_bits(fifth: Tensor, low: Tensor) -> Tensor:
    """Return [n, 32] numbers of 5 bits; bit i of the 4 bytes of `fifth` belongs to item i."""
    high = bits(fifth.unsqueeze(-1), 1, 8).flatten(1)
    return nibbles(low) | (high << 4)


DEQUANTIZE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32,
    "F16": as_float,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    **K_QUANTS,
}
"""Conversion functions by the name of GGUF's type."""
