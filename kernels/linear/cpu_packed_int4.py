"""Linear layers with 4-bit weights and INT8 activations, on CPUs with AVX-512 VNNI or AVX2.

y = x Wᵀ + b, where W[n, k] = (code[n, k] - zero[n, g]) * scale[n, g] and g is the group of input k.
Activations are quantized at run time, in blocks of 256 inputs (`quantize_blocks`). With 8 rows or
more, integer products are three times as fast as products with codes converted to float32. The
quantization of activations causes an error of about 0.6%; the rounding of weights to 4 bits causes
8 to 12%.

Order of summation: an element of y starts as its bias. Inputs are divided into blocks, and blocks
into runs of inputs of one group. The integer sum of a run is exact. It is multiplied by the scale
of the group, and the products of a block's runs are added in order. The sum of each block is then
multiplied by the scale of the activations and added to the element. An element of y therefore does
not depend on the number of rows, columns and threads.

Shapes: x [T, K], W [N, K], y [T, N], G groups of inputs, P panels of C outputs
(`panels.PANEL`).
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.cpu_common.cpu_features import has_byte_products
from penstock.kernels.cpu_common.numba_runtime import configure_numba, has_numba
from penstock.kernels.linear import quantize_blocks
from penstock.kernels.linear.cpu_packed_f32 import MIN_PARALLEL_MACS
from penstock.kernels.linear.int8_blocks import BLOCK_INPUTS, UNIT_INPUTS
from penstock.kernels.linear.panels import padded_bias, to_panels
from penstock.kernels.linear.quantize_blocks import quantize_per_block

_ROWS_AT_ONCE = 64  # rows that `_words` converts at a time, so that its copies fit in the L2 cache


def has_int4_loops() -> bool:
    """Return whether numba is installed and this CPU supports the loops."""
    return has_byte_products() and has_numba()


def supported_group(num_inputs: int, group_inputs: int) -> int | None:
    """Return the field `group_inputs` of a `PackedLinearInt4`, or None if there is no support.

    Runs of inputs of one group must have the same length in all blocks of 256 inputs. If one group
    contains all inputs, the result is rounded up to whole blocks.

    Args:
        num_inputs: number of inputs of the layer.
        group_inputs: number of successive inputs per group; the last group may have fewer.
    """
    if num_inputs % UNIT_INPUTS:
        return None
    if group_inputs >= num_inputs:
        return num_inputs + -num_inputs % BLOCK_INPUTS
    return group_inputs if divides_blocks(group_inputs) else None


def divides_blocks(group_inputs: int) -> bool:
    """Return whether a group of this size is one or more whole blocks, or divides a block evenly.

    A block has 256 inputs. A smaller group must be a multiple of UNIT_INPUTS.
    """
    if group_inputs % BLOCK_INPUTS == 0:
        return True
    return BLOCK_INPUTS % group_inputs == 0 and group_inputs % UNIT_INPUTS == 0


@dataclass(frozen=True, slots=True)
class PackedLinearInt4:
    """A linear layer with 4-bit weights in panels of C outputs, for quantized activations."""

    # the words [P, K / 8, C] of `_words` in panels, flattened and viewed as bytes
    codes: npt.NDArray[np.uint8] = field(repr=False)
    scales: npt.NDArray[np.float32] = field(repr=False)  # [P, G, C], flattened
    zeros: npt.NDArray[np.uint8] = field(repr=False)  # [P, G, C] zero points, flattened
    bias: npt.NDArray[np.float32] = field(repr=False)  # [P * C]; 0 from index `num_outputs` on
    num_inputs: int
    num_outputs: int
    group_inputs: int  # result of `supported_group`

    @property
    def run(self) -> int:
        """Return the number of inputs of a run: those of one group in a block.

        Only the last run of a row may have fewer inputs.
        """
        return min(self.group_inputs, BLOCK_INPUTS)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b [T, N]. Raise ValueError if x is not [T, K] float32."""
        num_rows, num_inputs = len(x), self.num_inputs
        if x.dim() != 2 or x.shape[1] != num_inputs or x.dtype != torch.float32:
            found = f"shape {list(x.shape)} and dtype {x.dtype}"
            raise ValueError(f"x has {found}: expected [T, {num_inputs}] float32")
        activations = quantize_per_block(x, self.run)
        y = torch.empty(num_rows, len(self.bias))
        work = num_rows * num_inputs * len(self.bias)
        _kernels().run(
            *(each.view(-1).numpy() for each in activations), num_rows, num_inputs, self.run,
            self.group_inputs, self.codes, self.scales, self.zeros, self.bias, y.view(-1).numpy(),
            num_threads=1 if work < MIN_PARALLEL_MACS else torch.get_num_threads(),
        )  # fmt: skip
        return y[:, : self.num_outputs].contiguous()


def pack_int4_panels(
    codes: Tensor, scales: Tensor, zeros: Tensor, group_inputs: int, bias: Tensor | None
) -> PackedLinearInt4:
    """Pack 4-bit weights; the result keeps no reference to the tensors.

    Args:
        codes: [N, K / 2] uint8; inputs 2 i and 2 i + 1 are in bits 0-3 and 4-7.
        scales: [N, G] float32.
        zeros: [N, G] uint8 zero points.
        group_inputs: result of `supported_group`.
        bias: [N] float32, or None.
    """
    num_outputs = len(codes)
    return PackedLinearInt4(
        to_panels(_words(codes)).view(np.uint8), to_panels(scales), to_panels(zeros),
        padded_bias(bias, num_outputs), 2 * codes.shape[1], num_outputs, group_inputs,
    )  # fmt: skip


def _words(codes: Tensor) -> Tensor:
    """Return the codes as int32 words [N, K / 8].

    Byte i of a word has the codes of inputs i and i + 4 in bits 0-3 and 4-7.
    """
    words = codes.contiguous().view(torch.int32).clone()
    for rows in torch.split(words, _ROWS_AT_ONCE):
        lower, upper = rows & 0xFFFF, (rows >> 16) & 0xFFFF  # `lower` and `upper`: four codes each
        for half in (lower, upper):
            half.bitwise_or_(half << 8).bitwise_and_(0x00FF00FF)
            half.bitwise_or_(half << 4).bitwise_and_(0x0F0F0F0F)  # now one code per byte
        torch.bitwise_or(lower, upper << 4, out=rows)
    return words


def load_cpu_kernels() -> None:
    """Load the compiled loops, compiling them if they are not in the cache on disk."""
    quantize_blocks.load_cpu_kernels()
    _kernels().load()


@cache
def _kernels() -> Any:
    configure_numba()
    from penstock.kernels.linear import cpu_int4_simd

    return cpu_int4_simd
