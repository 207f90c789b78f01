"""float32 linear layers with weights packed in panels, for CPUs with AVX2: y = x Wᵀ + b.

x is [T, K] and y [T, N]. W [N, K] is stored as P panels [P, K, C] of C output columns each, so that
the loop over K reads memory sequentially. C is three vectors: 48 columns with AVX-512, and 24 with
AVX2. There are two implementations:

- vectors (`linear/cpu_f32_simd`): a tile of one panel and 8 rows (AVX-512) or 4 rows (AVX2) fills
  the vector registers (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication",
  2008);
- AMX (`linear/cpu_f32_amx_bf16x6`), if the CPU supports AMX: each float32 is split into three
  bfloat16 parts, and six products of parts give a float32 product with errors as small as with
  AVX-512. With a few dozen rows or more, AMX is about twice as fast as AVX-512.

Both implementations prefetch weights during the multiplications. With few rows, only the memory
bandwidth therefore limits the speed. docs/performance.md compares them with oneDNN and MKL.

An output element starts as its bias. Then partial sums over fixed ranges of inputs are added one
after another; the order of the sums within a partial sum is fixed, too. With the same
implementation, an element is therefore bitwise identical for any number of rows, columns and
threads.
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
from penstock.kernels.cpu_common.cpu_features import has_avx2 as has_avx2
from penstock.kernels.cpu_common.deferred_loops import is_deferred
from penstock.kernels.cpu_common.numba_runtime import configure_numba, has_numba
from penstock.kernels.linear.panels import PANEL

Floats: TypeAlias = npt.NDArray[np.float32]

MIN_PARALLEL_MACS = 1 << 18
"""Smallest number of multiply-adds for which a second thread pays off."""

MIN_AMX_ROWS = 12
"""Smallest number of rows for which AMX is faster than AVX-512."""

LOOPS = "panels"
"""Name of the group of compiled loops, see `kernels/cpu_compilation.py`."""

_AMX_K, _AMX_N = 32, 64  # with AMX, K and N are padded to multiples of these numbers


def supports_packed_f32(weight: Tensor) -> bool:
    """Return whether `weight` can be packed in panels, the fastest format on CPUs with AVX2.

    The weight must be float32, not empty, and on a CPU with AVX2. numba must be installed.
    """
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_plain and weight.numel() > 0 and has_avx2() and has_numba()


@dataclass(frozen=True, slots=True)
class PackedLinearF32:
    """A float32 linear layer with its weights in panels."""

    panels: Floats = field(repr=False)  # [P, depth, C], flattened; inputs past `num_inputs` are 0
    bias: Floats = field(repr=False)  # [P * C or more]; 0 beyond the first `num_outputs`
    num_inputs: int
    num_outputs: int
    depth: int  # `num_inputs`, rounded up to a multiple of 32 if the CPU has AMX
    batch_invariant: bool  # True to use the same implementation for any number of rows

    def __call__(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b [T, N]. Raise ValueError if x is not [T, K] float32."""
        num_rows, num_inputs = len(x), self.num_inputs
        if x.dim() != 2 or x.shape[1] != num_inputs or x.dtype != torch.float32:
            found = f"shape {list(x.shape)} and dtype {x.dtype}"
            raise ValueError(f"x has {found}: expected [T, {num_inputs}] float32")
        if is_deferred(LOOPS):
            return self._multiply_with_torch(x)
        by_tiles = has_amx() and (self.batch_invariant or num_rows >= MIN_AMX_ROWS)
        loops = _amx_kernels() if by_tiles else _simd_kernels()
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

    def _multiply_with_torch(self, x: Tensor) -> Tensor:
        panels = torch.from_numpy(self.panels).view(-1, self.depth, PANEL)[:, : self.num_inputs]
        columns = torch.matmul(x, panels).transpose(0, 1).flatten(1)  # [T, P C]
        return columns[:, : self.num_outputs] + torch.from_numpy(self.bias[: self.num_outputs])


def pack_f32(weight: Tensor, bias: Tensor | None, batch_invariant: bool = False) -> PackedLinearF32:
    """Pack a float32 linear layer in panels; the result keeps no reference to `weight`.

    Args:
        weight: [N, K] float32 on a CPU, of any strides.
        bias: [N] or None.
        batch_invariant: use the same implementation for any number of rows, so that the result
            for a row does not depend on the number of rows.
    """
    num_outputs, num_inputs = weight.shape
    depth = num_inputs + (-num_inputs % _AMX_K if has_amx() else 0)
    num_panels = -(-num_outputs // PANEL)
    panels = torch.zeros(num_panels, depth, PANEL)
    for panel, rows in zip(panels, torch.split(weight, PANEL), strict=True):
        panel[:num_inputs, : len(rows)] = rows.T
    added = torch.zeros(num_panels * PANEL + _AMX_N)
    if bias is not None:
        added[:num_outputs] = bias
    panels_, bias_ = panels.view(-1).numpy(), added.numpy()
    return PackedLinearF32(panels_, bias_, num_inputs, num_outputs, depth, batch_invariant)


def packed_f32_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Reference implementation of `pack_f32` in float64."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@cache
def _simd_kernels() -> Any:
    configure_numba()
    from penstock.kernels.linear import cpu_f32_simd

    return cpu_f32_simd


@cache
def _amx_kernels() -> Any:
    configure_numba()
    from penstock.kernels.linear import cpu_f32_amx_bf16x6

    return cpu_f32_amx_bf16x6


def load_cpu_kernels() -> None:
    """Load the loops that this CPU uses, compiling them if they are not in the cache on disk."""
    _simd_kernels().load()
    if has_amx():
        _amx_kernels().load()
