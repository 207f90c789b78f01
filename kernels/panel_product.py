"""Products with weights in panels, on a CPU with wide vectors: y = x Wᵀ + b, in float32.

W [N, K] is kept as [P, K, 48]: 48 of its rows side by side, so that a step through the inputs reads
one place after the next, and eight rows of x with a panel fill the registers (the scheme of Goto
and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008). What a panel's next
inputs need is asked for while the present ones are computed: for few rows the weights come as fast
as memory gives them. docs/performance.md has it beside oneDNN and MKL.

An element is b, and then the sums over 192 inputs at a time, each from its first input to its last
by fused multiplications and additions: the same bits for any number of rows, columns and threads.
"""

from dataclasses import dataclass, field
from functools import cache
from threading import Thread
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.compiled import settle_numba

Floats: TypeAlias = npt.NDArray[np.float32]

ALONE = 1 << 18
"""Multiplications from which on a second thread is worth waking."""


def can_panel(weight: Tensor) -> bool:
    """The rule by which this form is taken: where it is the fastest, as far as was measured."""
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_plain and weight.numel() > 0 and has_wide_vectors()


@cache
def has_wide_vectors() -> bool:
    """Whether this machine computes 16 numbers at once."""
    return torch.cpu._is_avx512_supported()


@dataclass(frozen=True, slots=True)
class PanelProduct:
    """Weights in panels."""

    panels: Floats = field(repr=False)  # [P K width], flat
    bias: Floats = field(repr=False)  # [P width], flat
    num_inputs: int
    num_outputs: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] float32 gives [T, N]. ValueError where x is something else."""
        num_rows, num_inputs = len(x), self.num_inputs
        if x.dim() != 2 or x.shape[1] != num_inputs or x.dtype != torch.float32:
            asked = f"[T, {num_inputs}] float32"
            raise ValueError(f"x: {asked} expected, not {list(x.shape)} {x.dtype}")
        loops = _loops()
        if num_rows % loops.HIGH and num_rows != 1:
            x = functional.pad(x, (0, 0, 0, -num_rows % loops.HIGH))
        y = torch.empty(len(x), self.num_outputs)
        work = len(x) * num_inputs * self.num_outputs
        loops.fill(
            x.contiguous().view(-1).numpy(), len(x), num_inputs, self.panels, self.bias,
            y.view(-1).numpy(), self.num_outputs,
            num_threads=1 if work < ALONE else torch.get_num_threads(),
        )  # fmt: skip
        return y[:num_rows]


def panel_product(weight: Tensor, bias: Tensor | None) -> PanelProduct:
    """weight: [N, K] float32 on a CPU, of any strides; bias: [N]. Nothing of `weight` is kept."""
    num_outputs, num_inputs = weight.shape
    width = _loops().PANEL
    num_panels = -(-num_outputs // width)
    panels = torch.zeros(num_panels, num_inputs, width)
    for panel, rows in zip(panels, torch.split(weight, width), strict=True):
        panel[:, : len(rows)] = rows.T
    added = torch.zeros(num_panels * width)
    if bias is not None:
        added[:num_outputs] = bias
    return PanelProduct(panels.view(-1).numpy(), added.numpy(), num_inputs, num_outputs)


def panel_product_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `panel_product` means, in float64."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@cache
def _loops() -> Any:
    settle_numba()
    from penstock.kernels import panel_loops

    return panel_loops


def prepare_panels(device: torch.device, dtype: torch.dtype) -> Thread:
    """Starts to load the loops, where they will be used; to be joined."""
    used = device.type == "cpu" and dtype == torch.float32 and has_wide_vectors()
    thread = Thread(target=_loops if used else int, daemon=True)
    thread.start()
    return thread
