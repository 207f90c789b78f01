"""Products with weights in panels, on a CPU with wide vectors: y = x Wᵀ + b, in float32.

W [N, K] is kept as [P, K, 48]: 48 of its rows side by side, so that a step through the inputs reads
one place after the next. Two ways compute with them:

- by vectors (`panel_loops`): eight rows of x with a panel fill the registers (the scheme of Goto
  and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008);
- by the matrix unit, where there is one (`split_loops`): numbers are split into three of bfloat16,
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

from penstock.kernels.compiled import settle_numba
from penstock.kernels.cpu_features import has_matrix_unit as has_matrix_unit
from penstock.kernels.cpu_features import has_wide_vectors as has_wide_vectors

Floats: TypeAlias = npt.NDArray[np.float32]

ALONE = 1 << 18
"""Multiplications from which on a second thread is worth waking."""

SPLIT_ROWS = 12
"""Rows from which on the matrix unit is the faster way."""

_DEEP, _BROAD = 32, 64  # inputs that it takes at once, and outputs


def can_panel(weight: Tensor) -> bool:
    """The rule by which this form is taken: where it is the fastest, as far as was measured."""
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_plain and weight.numel() > 0 and has_wide_vectors()


@dataclass(frozen=True, slots=True)
class PanelProduct:
    """Weights in panels."""

    panels: Floats = field(repr=False)  # [P depth width], flat; no inputs: zeros
    bias: Floats = field(repr=False)  # [>= P width], flat
    num_inputs: int
    num_outputs: int
    depth: int  # inputs, and some that are none
    alike: bool  # any number of rows goes the same way

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] float32 gives [T, N]. ValueError where x is something else."""
        num_rows, num_inputs = len(x), self.num_inputs
        if x.dim() != 2 or x.shape[1] != num_inputs or x.dtype != torch.float32:
            asked = f"[T, {num_inputs}] float32"
            raise ValueError(f"x: {asked} expected, not {list(x.shape)} {x.dtype}")
        by_tiles = has_matrix_unit() and (self.alike or num_rows >= SPLIT_ROWS)
        loops = _split_loops() if by_tiles else _loops()
        read, written, width = loops.room(num_rows, self.num_outputs)
        if read != num_rows or self.depth != num_inputs:
            x = functional.pad(x, (0, self.depth - num_inputs, 0, read - num_rows))
        y = torch.empty(written, width)
        work = num_rows * num_inputs * self.num_outputs
        loops.fill(
            x.contiguous().view(-1).numpy(), read, self.depth, self.panels, self.bias,
            y.view(-1).numpy(), self.num_outputs,
            num_threads=1 if work < ALONE else torch.get_num_threads(),
        )  # fmt: skip
        return y[:num_rows, : self.num_outputs].contiguous()


def panel_product(weight: Tensor, bias: Tensor | None, alike: bool = False) -> PanelProduct:
    """weight: [N, K] float32 on a CPU, of any strides; bias: [N]. Nothing of `weight` is kept.

    alike: a row's bits depend on that row alone, not on how many there are.
    """
    num_outputs, num_inputs = weight.shape
    width = _loops().PANEL
    depth = num_inputs + (-num_inputs % _DEEP if has_matrix_unit() else 0)
    num_panels = -(-num_outputs // width)
    panels = torch.zeros(num_panels, depth, width)
    for panel, rows in zip(panels, torch.split(weight, width), strict=True):
        panel[:num_inputs, : len(rows)] = rows.T
    added = torch.zeros(num_panels * width + _BROAD)
    if bias is not None:
        added[:num_outputs] = bias
    panels_, bias_ = panels.view(-1).numpy(), added.numpy()
    return PanelProduct(panels_, bias_, num_inputs, num_outputs, depth, alike)


def panel_product_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `panel_product` means, in float64."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@cache
def _loops() -> Any:
    settle_numba()
    from penstock.kernels import panel_loops

    return panel_loops


@cache
def _split_loops() -> Any:
    settle_numba()
    from penstock.kernels import split_loops

    return split_loops


def load_loops() -> None:
    """Load the loops that this machine uses; compile them, the first time."""
    _loops().load()
    if has_matrix_unit():
        _split_loops().load()
