"""Products with weights in panels, on a CPU with wide vectors: y = x Wᵀ + b, in float32.

W [N, K] is kept as [P, K, 48]: 48 of its rows side by side, so that a step through the inputs reads
one place after the next. Two ways compute with them:

- by vectors (`linear/cpu_f32_avx512`): eight rows of x with a panel fill the registers (the scheme
of Goto
  and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008);
- by the matrix unit, where there is one (`linear/cpu_f32_amx_bf16x6`): numbers are split into three
of bfloat16,
  and six products of those are a product of float32, with errors as small as the other way's.
  About twice as fast from some dozens of rows on.

Either asks for what it needs next while it computes: for few rows the weights come as fast as
memory gives them. docs/performance.md has both beside oneDNN and MKL.

In both an element is b, and then the sums over some inputs at a time, each in one order: the same
bits for any number of columns and threads, and for any number of rows that go the same way.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cpu_common.cpu_features import has_amx as has_amx
from penstock.kernels.cpu_common.cpu_features import has_avx512 as has_avx512
from penstock.kernels.cpu_common.numba_runtime import configure_numba

Floats: TypeAlias = npt.NDArray[np.float32]

MIN_PARALLEL_MACS = 1 << 18
"""Multiplications from which on a second thread is worth waking."""

MIN_AMX_ROWS = 12
"""Rows from which on the matrix unit is the faster way."""

_AMX_K, _AMX_N = 32, 64  # inputs that it takes at once, and outputs


def supports_packed_f32(weight: Tensor) -> bool:
    """The rule by which this form is taken: where it is the fastest, as far as was measured."""
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_plain and weight.numel() > 0 and has_avx512()


@dataclass(frozen=True, slots=True)
class PackedLinearF32:
    """Weights in panels."""

    panels: Floats = field(repr=False)  # [P depth width], flat; no inputs: zeros
    bias: Floats = field(repr=False)  # [>= P width], flat
    num_inputs: int
    num_outputs: int
    depth: int  # inputs, and some that are none
    batch_invariant: bool  # any number of rows goes the same way

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] float32 gives [T, N]. ValueError where x is something else."""
        num_rows, num_inputs = len(x), self.num_inputs
        if x.dim() != 2 or x.shape[1] != num_inputs or x.dtype != torch.float32:
            expected = f"[T, {num_inputs}] float32"
            raise ValueError(f"x: {expected} expected, not {list(x.shape)} {x.dtype}")
        by_tiles = has_amx() and (self.batch_invariant or num_rows >= MIN_AMX_ROWS)
        loops = _amx_kernels() if by_tiles else _avx512_kernels()
        read, written, width = loops.padded_sizes(num_rows, self.num_outputs)
        if read != num_rows or self.depth != num_inputs:
            x = functional.pad(x, (0, self.depth - num_inputs, 0, read - num_rows))
        y = torch.empty(written, width)
        work = num_rows * num_inputs * self.num_outputs
        loops.run(
            x.contiguous().view(-1).numpy(), read, self.depth, self.panels, self.bias,
            y.view(-1).numpy(), self.num_outputs,
            num_threads=1 if work < MIN_PARALLEL_MACS else torch.get_num_threads(),
        )  # fmt: skip
        return y[:num_rows, : self.num_outputs].contiguous()


def pack_f32(weight: Tensor, bias: Tensor | None, batch_invariant: bool = False) -> PackedLinearF32:
    """weight: [N, K] float32 on a CPU, of any strides; bias: [N]. Nothing of `weight` is kept.

    alike: a row's bits depend on that row alone, not on how many there are.
    """
    num_outputs, num_inputs = weight.shape
    width = _avx512_kernels().PANEL
    depth = num_inputs + (-num_inputs % _AMX_K if has_amx() else 0)
    num_panels = -(-num_outputs // width)
    panels = torch.zeros(num_panels, depth, width)
    for panel, rows in zip(panels, torch.split(weight, width), strict=True):
        panel[:num_inputs, : len(rows)] = rows.T
    added = torch.zeros(num_panels * width + _AMX_N)
    if bias is not None:
        added[:num_outputs] = bias
    panels_, bias_ = panels.view(-1).numpy(), added.numpy()
    return PackedLinearF32(panels_, bias_, num_inputs, num_outputs, depth, batch_invariant)


def packed_f32_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `pack_f32` means, in float64."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@cache
def _avx512_kernels() -> Any:
    configure_numba()
    from penstock.kernels.linear import cpu_f32_avx512

    return cpu_f32_avx512


@cache
def _amx_kernels() -> Any:
    configure_numba()
    from penstock.kernels.linear import cpu_f32_amx_bf16x6

    return cpu_f32_amx_bf16x6


def load_cpu_kernels() -> None:
    """Load the loops that this machine uses; compile them, the first time."""
    _avx512_kernels().load()
    if has_amx():
        _amx_kernels().load()
