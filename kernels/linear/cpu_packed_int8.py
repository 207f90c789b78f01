"""INT8 linear layers on CPUs with AMX, AVX-512 VNNI or AVX2: y = s_x s_w (q_x - 128) q_wᵀ + b.

x is [T, K], W [N, K] and y [T, N]. Activations are quantized to q_x at run time, with one scale s_x
per row of x or one static scale (`quantize_rows`). Weights are quantized to q_w once, with one
scale s_w per row of W. The int32 sums are exact, so the result for a row does not depend on the
other rows. Each sum is multiplied first by s_w, as in oneDNN, and then by s_x.

W [N, K] is stored in the order in which AMX reads it: blocks of 64 outputs; in each block, steps of
64 inputs; in each step, four tiles of 16 outputs. The other loops read the same order. All CPUs
give bitwise identical results.
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
from penstock.kernels.linear.cpu_packed_f32 import MIN_PARALLEL_MACS, has_amx
from penstock.kernels.linear.quantize_rows import ZERO_POINT, quantize_per_token

Floats = npt.NDArray[np.float32]

_TILE_K, _BLOCK_COLUMNS = (
    64,
    64,
)  # inputs per tile and output columns per block; equal to those of `linear/cpu_int8_amx`


def supports_int8_tiles(weight: Tensor) -> bool:
    """Return whether `pack_int8_tiles` supports these weights on this CPU."""
    return weight.numel() > 0 and weight.shape[1] % _TILE_K == 0 and has_int8_loops()


def has_int8_loops() -> bool:
    """Return whether numba is installed and this CPU supports the loops."""
    return has_byte_products() and has_numba()


@dataclass(frozen=True, slots=True)
class PackedLinearInt8:
    """An INT8 linear layer with its weights in tiles."""

    tiles: npt.NDArray[np.uint8] = field(repr=False)  # [blocks, steps, 4, 16, 16, 4], flattened
    shifts: npt.NDArray[np.int32] = field(repr=False)  # [blocks * 64] -128 * sum of each weight row
    scales: Floats = field(repr=False)  # [blocks * 64] one per weight row; 0 past `num_outputs`
    bias: Floats = field(repr=False)  # [blocks * 64]; 0 from index `num_outputs` on
    num_inputs: int
    num_outputs: int
    input_limit: float = 0.0  # `limit` of `quantize_per_token`

    def __call__(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b [T, N]. Raise ValueError if x is not [T, K] float32."""
        num_rows, num_inputs = len(x), self.num_inputs
        if x.dim() != 2 or x.shape[1] != num_inputs or x.dtype != torch.float32:
            found = f"shape {list(x.shape)} and dtype {x.dtype}"
            raise ValueError(f"x has {found}: expected [T, {num_inputs}] float32")
        qvalues, factors = quantize_per_token(x, self.input_limit)
        y = torch.empty(num_rows, len(self.scales))
        _kernels().run(
            qvalues.view(-1).numpy(), num_rows, num_inputs, self.tiles, self.shifts,
            factors.view(-1).numpy(), self.scales, self.bias, y.view(-1).numpy(),
            len(self.scales) // _BLOCK_COLUMNS,
            num_threads=(
                1 if num_rows * self.tiles.size < MIN_PARALLEL_MACS else torch.get_num_threads()
            ),
        )  # fmt: skip
        return y[:, : self.num_outputs].contiguous()


def pack_int8_tiles(
    qweight: Tensor, scales: Tensor, bias: Tensor | None, input_limit: float = 0.0
) -> PackedLinearInt8:
    """Pack a linear layer with quantized weights in tiles; see `op.pack_int8_codes`."""
    num_outputs, num_inputs = qweight.shape
    num_blocks = -(-num_outputs // _BLOCK_COLUMNS)
    whole = torch.zeros(num_blocks * _BLOCK_COLUMNS, num_inputs, dtype=torch.int8)
    whole[:num_outputs] = qweight
    # Rearrange [blocks, 4, 16 outputs, steps, 16, 4 inputs] to
    # [blocks, steps, 4, 16, 16 outputs, 4 inputs].
    blocks = whole.view(num_blocks, 4, 16, num_inputs // _TILE_K, 16, 4)
    tiles = blocks.permute(0, 3, 1, 4, 2, 5).contiguous().view(torch.uint8)
    shifts = whole.sum(1, dtype=torch.int32) * -ZERO_POINT
    wide_scales, wide_bias = torch.zeros(2, len(whole))
    wide_scales[:num_outputs] = scales
    if bias is not None:
        wide_bias[:num_outputs] = bias
    return PackedLinearInt8(
        tiles.view(-1).numpy(), shifts.to(torch.int32).numpy(), wide_scales.numpy(),
        wide_bias.numpy(), num_inputs, num_outputs, input_limit,
    )  # fmt: skip


def load_cpu_kernels() -> None:
    """Load the compiled loops, compiling them if they are not in the cache on disk."""
    _kernels().load()


@cache
def _kernels() -> Any:
    configure_numba()
    from penstock.kernels.linear import cpu_int8_amx, cpu_int8_simd

    return cpu_int8_amx if has_amx() else cpu_int8_simd
