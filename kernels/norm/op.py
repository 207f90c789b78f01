"""Norms over the last dimension: RMS norm (Zhang, Sennrich, 2019), layer norm (Ba et al., 2016).

    RMS:        y = x / sqrt(mean(x²) + eps) * weight
    Gemma RMS:  y = x / sqrt(mean(x²) + eps) * (1 + weight)
    layer:      y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

`x` is [..., D], `weight` and `bias` are [D], all of the same floating dtype. The functions return a
new tensor like `x`; functions whose name ends in `_` replace `x`. On a GPU, the arithmetic is
float32 (`norm/triton`). The result for a row does not depend on other rows. float32 rows on a CPU
are computed by numba loops (`norm/cpu`).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.checks import FLOATS, check
from penstock.kernels.cpu_common.deferred_loops import is_deferred
from penstock.kernels.cpu_common.numba_runtime import (
    MIN_PARALLEL_ELEMENTS,
    configure_numba,
    has_numba,
)
from penstock.kernels.norm.triton import MAX_FEATURES, norm_triton
from penstock.kernels.triton_common.launch import use_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of every row."""
    if use_triton(x):
        return _normalised(x, weight, None, eps)
    if _runs_on_cpu_kernel(x, weight):
        return _norm_cpu(x.contiguous(), _NOTHING, weight, eps)
    return functional.rms_norm(x, weight.shape, weight, eps)


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Replace every row by its RMS norm. `x` may be a 2-D or 3-D view with contiguous rows."""
    if use_triton(x):
        _norm(x, None, weight, None, x, eps, above_one=False)
    else:
        x.copy_(rms_norm(x, weight, eps))


def fused_add_rms_norm(hidden: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to `hidden` in place, and return the `rms_norm` of the sum.

    The sum is rounded to the dtype of `hidden` before it is normalized.
    """
    if use_triton(hidden):
        return _normalised(hidden, weight, None, eps, added=x)
    if _runs_on_cpu_kernel(hidden, weight) and hidden.is_contiguous() and x.shape == hidden.shape:
        return _norm_cpu(hidden, x.contiguous(), weight, eps)
    return rms_norm(hidden.add_(x), weight, eps)


_NOTHING = torch.empty(0)

LOOPS = "norms"
"""Name of the group of compiled loops, see `kernels/cpu_compilation.py`."""


def _runs_on_cpu_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether the numba loops support these tensors: float32 on a CPU.

    The loops take about half of torch's time. Their results differ from torch's results in the last
    bits, and a row's result must not depend on the number of rows. The decision must therefore not
    depend on strides, because strides may change with the number of rows.
    """
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    fits = plain and x.shape[-1:] == weight.shape and x.numel() > 0
    return fits and has_numba() and not is_deferred(LOOPS)


def _norm_cpu(hidden: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(hidden)
    threads = 1 if hidden.numel() < MIN_PARALLEL_ELEMENTS else torch.get_num_threads()
    _cpu_kernels().run(
        hidden.view(-1).numpy(), x.view(-1).numpy(), weight.numpy(), eps, out.view(-1).numpy(),
        threads,
    )  # fmt: skip
    return out


def load_cpu_kernels() -> None:
    """Load the numba loops from disk, or compile them if they are not cached."""
    _cpu_kernels().load()


@cache
def _cpu_kernels() -> Any:
    configure_numba()
    from penstock.kernels.norm import cpu as norm_loops

    return norm_loops


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Reference for `rms_norm`, in float64."""
    wide = x.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.double()).to(x.dtype)


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the Gemma RMS norm of every row.

    The norm is computed in float32, because a sum 1 + weight in a narrower dtype would lose small
    weights.
    """
    if use_triton(x):
        return _normalised(x, weight, None, eps, above_one=True)
    return rms_norm(x.float(), 1.0 + weight.float(), eps).to(x.dtype)


def fused_add_gemma_rms_norm(hidden: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to `hidden` in place, and return the Gemma RMS norm of the rounded sum."""
    if use_triton(hidden):
        return _normalised(hidden, weight, None, eps, added=x, above_one=True)
    return gemma_rms_norm(hidden.add_(x), weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the layer norm of every row."""
    if use_triton(x):
        return _normalised(x, weight, bias, eps)
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def fused_add_layer_norm(
    hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """Add `x` to `hidden` in place, and return the layer norm of the rounded sum."""
    if use_triton(hidden):
        return _normalised(hidden, weight, bias, eps, added=x)
    return layer_norm(hidden.add_(x), weight, bias, eps)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Reference for `layer_norm`, in float64."""
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * scale * weight.double() + bias.double()).to(x.dtype)


def _normalised(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    added: Tensor | None = None,
    above_one: bool = False,
) -> Tensor:
    """Return the norm of `x` [..., D] in a new tensor.

    Unless `x` has two or three dimensions, it must be contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = x if x.dim() in (2, 3) else x.view(-1, x.shape[-1])
    _norm(flat, added, weight, bias, out.view(flat.shape), eps, above_one)
    return out


def _norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    above_one: bool,
) -> None:
    """Check the arguments of `norm_triton`, and call it.

    Errors name the parameters of the public functions. If `added` is given, `x` is therefore called
    `hidden` in errors, and `added` is called `x`.
    """
    dim, name = x.shape[-1], "x" if added is None else "hidden"
    check(name, x, [*"TH"[: x.dim() - 1], dim], FLOATS)
    check("weight", weight, [dim], [x.dtype], like=x)
    if bias is not None:
        check("bias", bias, [dim], [x.dtype], like=x)
    if added is not None:
        check("x", added, list(x.shape), [x.dtype], like=x)
    if not 0 < dim <= MAX_FEATURES:
        raise ValueError(f"{name} has {dim} features per row: expected 1 to {MAX_FEATURES}")
    norm_triton(x, added, weight, bias, out, eps, above_one)
