"""Quantization of activations to int8, with one scale per block of 256 inputs of a row.

x_i ≈ q_i s with q_i from -127 to 127 and the block's scale s = max |x| / 127. If a block contains
NaN or Inf, s is NaN or Inf, so the error propagates to the output. The results for a row do not
depend on the other rows. llama.cpp quantizes activations in the same blocks (format Q8_K). The
loops exist only for CPUs; numba compiles them (`linear/cpu_quantize_blocks`).
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cpu_common.numba_runtime import MIN_PARALLEL_ELEMENTS, configure_numba
from penstock.kernels.linear.int8_blocks import BLOCK_INPUTS
from penstock.kernels.linear.quantize_rows import MIN_SCALE, QMAX


class QuantizedBlocks(NamedTuple):
    """Quantized activations of T rows of K inputs."""

    qvalues: Tensor  # [T, K] int8
    scales: Tensor  # [T, ceil(K / 256)] float32
    offsets: Tensor  # [T, ceil(K / run)] int32: minus the sum of `qvalues` of each run of inputs


def quantize_per_block(x: Tensor, run: int) -> QuantizedBlocks:
    """Quantize x [T, K] float32.

    Args:
        run: number of inputs per run, which has one offset; a divisor of 256.
    """
    num_rows, num_inputs = x.shape
    found = QuantizedBlocks(
        torch.empty(num_rows, num_inputs, dtype=torch.int8),
        torch.empty(num_rows, -(-num_inputs // BLOCK_INPUTS)),
        torch.empty(num_rows, -(-num_inputs // run), dtype=torch.int32),
    )
    _cpu_kernels().run(
        x.contiguous().view(-1).numpy(), *(each.view(-1).numpy() for each in found), num_inputs,
        run, num_rows,
        num_threads=1 if x.numel() < MIN_PARALLEL_ELEMENTS else torch.get_num_threads(),
    )  # fmt: skip
    return found


def quantize_per_block_reference(x: Tensor, run: int) -> QuantizedBlocks:
    """Reference implementation of `quantize_per_block`."""
    num_rows, num_inputs = x.shape
    padded = functional.pad(x, (0, -num_inputs % BLOCK_INPUTS))
    blocks = padded.view(num_rows, padded.shape[1] // BLOCK_INPUTS, BLOCK_INPUTS)
    largest = blocks.abs().amax(2).clamp_min(MIN_SCALE)
    # torch would compute `QMAX / largest` as a product with the reciprocal, which rounds twice.
    steps = torch.full_like(largest, QMAX) / largest
    qvalues = (blocks * steps[:, :, None]).round().to(torch.int8)
    sums = qvalues.view(num_rows, padded.shape[1] // run, run).sum(2, dtype=torch.int32)
    return QuantizedBlocks(
        qvalues.view(padded.shape)[:, :num_inputs].contiguous(), largest / QMAX,
        -sums[:, : -(-num_inputs // run)],
    )  # fmt: skip


def load_cpu_kernels() -> None:
    """Load the compiled loops, compiling them if they are not in the cache on disk."""
    _cpu_kernels().load()


@cache
def _cpu_kernels() -> Any:
    configure_numba()
    from penstock.kernels.linear import cpu_quantize_blocks

    return cpu_quantize_blocks
