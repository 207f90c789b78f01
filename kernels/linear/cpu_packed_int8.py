"""INT8 linear layers on CPUs with AMX, AVX-512 VNNI or AVX2: y = s_x s_w (q_x - 128) q_wᵀ + b.

x is [T, K], W [N, K] and y [T, N]. Activations are quantized to q_x at run time, with one scale s_x
per row of x or one static scale (`quantize_rows`). Weights are quantized to q_w once, with one
scale s_w per row of W. The int32 sums are exact, so the result for a row does not depend on the
other rows. Each sum is multiplied first by s_w, as in oneDNN, and then by s_x.

W [N, K] is stored in tiles of 16 outputs and 64 inputs, as AMX reads them. The tiles of the same 16
outputs are contiguous (a strip). All loops read this order. All CPUs give bitwise identical
results.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.cpu_common.cpu_features import has_byte_products
from penstock.kernels.cpu_common.numba_runtime import configure_numba, has_numba
from penstock.kernels.linear.cpu_packed_f32 import MIN_PARALLEL_MACS, has_amx
from penstock.kernels.linear.gate_kinds import NO_GATE, SILU, TANH_GELU
from penstock.kernels.linear.quantize_rows import ZERO_POINT, quantize_per_token

Floats = npt.NDArray[np.float32]

_TILE_K, _BLOCK_COLUMNS = (
    64,
    64,
)  # inputs per tile and output columns per block; equal to those of `linear/cpu_int8_amx`

_BLOCK_ROWS = 32
"""Rows are computed in blocks of this size; equal to the constant of `linear/cpu_int8_amx`."""

_ROWS_PER_THREAD = 4 * _BLOCK_ROWS
"""Rows are divided among threads if each thread gets at least this many."""


def supports_int8_tiles(weight: Tensor) -> bool:
    """Return whether `pack_int8_tiles` supports these weights on this CPU."""
    return weight.numel() > 0 and weight.shape[1] % _TILE_K == 0 and has_int8_loops()


def has_int8_loops() -> bool:
    """Return whether numba is installed and this CPU supports the loops."""
    return has_byte_products() and has_numba()


@dataclass(frozen=True, slots=True)
class PackedLinearInt8:
    """An INT8 linear layer with its weights in tiles."""

    tiles: npt.NDArray[np.uint8] = field(
        repr=False
    )  # [blocks, 4 strips, steps, 16, 16, 4], flattened
    shifts: npt.NDArray[np.int32] = field(repr=False)  # [blocks * 64] -128 * sum of each weight row
    scales: Floats = field(repr=False)  # [blocks * 64] one per weight row; 0 past `num_outputs`
    bias: Floats = field(repr=False)  # [blocks * 64]; 0 from index `num_outputs` on
    num_inputs: int
    num_outputs: int
    input_limit: float = 0.0  # `limit` of `quantize_per_token`

    def __call__(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b [T, N]. Raise ValueError if x is not [T, K] float32."""
        self._check(x)
        num_rows, num_inputs, width = len(x), self.num_inputs, len(self.scales)
        if self._divides_rows(num_rows):
            y = self._compute_rows(x, NO_GATE)
            return y[:, : self.num_outputs].contiguous()
        qvalues, factors = quantize_per_token(x, self.input_limit)
        y = torch.empty(num_rows, width)
        _kernels().columns.run(
            qvalues.view(-1).numpy(), num_rows, num_inputs, self.tiles, self.shifts,
            factors.view(-1).numpy(), self.scales, self.bias, y.view(-1).numpy(),
            width // _BLOCK_COLUMNS,
            num_threads=(
                1 if num_rows * self.tiles.size < MIN_PARALLEL_MACS else torch.get_num_threads()
            ),
        )  # fmt: skip
        return y[:, : self.num_outputs].contiguous()

    def fuses_gate(self, num_rows: int) -> bool:
        """Return whether `gated` supports this layer and this number of rows.

        The result of `gated` has the same bits as a separate activation by the compiled loops of
        `activation/cpu`.
        """
        return self.num_outputs % _BLOCK_COLUMNS == 0 and self._divides_rows(num_rows)

    def gated(self, x: Tensor, gate: int) -> Tensor:
        """Return the gated activation of x Wᵀ + b [T, N / 2]; the first N / 2 outputs are gates.

        Args:
            x: [T, K] float32; `fuses_gate(T)` must be true.
            gate: SILU or TANH_GELU, see `gate_kinds`.

        Raises:
            ValueError: x has another shape or dtype, or the gate is not supported.
        """
        self._check(x)
        if gate not in (SILU, TANH_GELU) or not self.fuses_gate(len(x)):
            raise ValueError(
                f"a layer with {self.num_outputs} outputs does not support gate {gate} for "
                f"{len(x)} rows"
            )
        return self._compute_rows(x, gate)

    def _check(self, x: Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self.num_inputs or x.dtype != torch.float32:
            found = f"shape {list(x.shape)} and dtype {x.dtype}"
            raise ValueError(f"x has {found}: expected [T, {self.num_inputs}] float32")

    def _divides_rows(self, num_rows: int) -> bool:
        """Return whether the rows of a product are divided among threads, not the columns."""
        enough = _ROWS_PER_THREAD * torch.get_num_threads()
        return _kernels().rows is not None and num_rows >= enough

    def _compute_rows(self, x: Tensor, gate: int) -> Tensor:
        """Return y with all padded columns, or the gated activation; each thread has its rows."""
        width = len(self.scales) if gate == NO_GATE else len(self.scales) // 2
        num_blocks = -(-len(x) // _BLOCK_ROWS)
        tiles = torch.empty(num_blocks * _BLOCK_ROWS * self.num_inputs, dtype=torch.uint8)
        y, factors = torch.empty(len(x), width), torch.empty(len(x))
        _kernels().rows.run(
            x.contiguous().view(-1).numpy(), self.num_inputs, self.input_limit, tiles.numpy(),
            factors.numpy(), self.tiles, self.shifts, self.scales, self.bias, gate,
            y.view(-1).numpy(), num_threads=torch.get_num_threads(),
        )  # fmt: skip
        return y


def pack_int8_tiles(
    qweight: Tensor, scales: Tensor, bias: Tensor | None, input_limit: float = 0.0
) -> PackedLinearInt8:
    """Pack a linear layer with quantized weights in tiles; see `op.pack_int8_codes`."""
    num_outputs, num_inputs = qweight.shape
    num_blocks = -(-num_outputs // _BLOCK_COLUMNS)
    whole = torch.zeros(num_blocks * _BLOCK_COLUMNS, num_inputs, dtype=torch.int8)
    whole[:num_outputs] = qweight
    # Rearrange [blocks, 4, 16 outputs, steps, 16, 4 inputs] to
    # [blocks, 4, steps, 16, 16 outputs, 4 inputs].
    blocks = whole.view(num_blocks, 4, 16, num_inputs // _TILE_K, 16, 4)
    tiles = blocks.permute(0, 1, 3, 4, 2, 5).contiguous().view(torch.uint8)
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
    for loops in _kernels():
        if loops is not None:
            loops.load()


class _Kernels(NamedTuple):
    """Modules of compiled loops."""

    columns: Any  # each thread computes some columns of the output
    rows: Any  # each thread computes some rows of the output; None: this CPU has no such loops


@cache
def _kernels() -> _Kernels:
    configure_numba()
    from penstock.kernels.linear import cpu_int8_simd

    if not has_amx():
        return _Kernels(cpu_int8_simd, None)
    from penstock.kernels.linear import cpu_int8_amx, cpu_int8_amx_rows

    return _Kernels(cpu_int8_amx, cpu_int8_amx_rows)
