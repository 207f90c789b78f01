"""Norms over the last dimension: RMS norm (Zhang, Sennrich, 2019), layer norm (Ba et al., 2016).

    RMS:        y = x / sqrt(mean(x²) + eps) * weight
    Gemma RMS:  y = x / sqrt(mean(x²) + eps) * (1 + weight)
    layer:      y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

`x` is [..., D], `weight` and `bias` are [D], all of the same floating dtype. The functions return a
new tensor like `x`; functions whose name ends in `_` replace `x`. On a GPU, each row is read once,
normalized in float32 and written once. The result for a row does not depend on other rows.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cpu_common.numba_runtime import (
    MIN_PARALLEL_ELEMENTS,
    configure_numba,
    has_numba,
)
from penstock.kernels.triton_common.aot import AotCase, meta
from penstock.kernels.triton_common.launch import (
    FLOATS,
    check,
    device_info,
    jit,
    launch,
    power_of_2,
    tl,
    use_triton,
)

MAX_FEATURES = 1 << 16
"""Maximum number of features of a row. One program holds the whole row in registers."""

TILE = 4096
"""Features per program; several short rows share one program. Tiles depend only on D, so the result
is batch-invariant."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of every row."""
    if use_triton(x):
        return _normalised(x, weight, None, eps)
    if _runs_on_cpu_kernel(x, weight):
        return _norm_cpu(x.contiguous(), _NOTHING, weight, eps)
    return functional.rms_norm(x, weight.shape, weight, eps)


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """In-place version of `rms_norm`. `x` may be a 2-D or 3-D view with contiguous rows."""
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


def _runs_on_cpu_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether the numba loops support these tensors: float32 on a CPU.

    The loops take half of torch's time or slightly more, and their results differ from torch's in
    the last bits. The decision must therefore not depend on strides, because strides may change
    with the number of rows.
    """
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    return plain and x.shape[-1:] == weight.shape and x.numel() > 0 and has_numba()


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
    """Return the Gemma RMS norm of every row, computed in float32.

    A sum 1 + weight in a narrower dtype would lose small weights.
    """
    if use_triton(x):
        return _normalised(x, weight, None, eps, above_one=True)
    return rms_norm(x.float(), 1.0 + weight.float(), eps).to(x.dtype)


def fused_add_gemma_rms_norm(hidden: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Version of `fused_add_rms_norm` with the Gemma RMS norm."""
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
    """Version of `fused_add_rms_norm` with a layer norm."""
    if use_triton(hidden):
        return _normalised(hidden, weight, bias, eps, added=x)
    return layer_norm(hidden.add_(x), weight, bias, eps)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Reference for `layer_norm`, in float64."""
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * scale * weight.double() + bias.double()).to(x.dtype)


@jit(unspecialized=("num_rows",))
def _norm_rows(
    x,  # [T, H, D]
    added,  # [T, H, D] contiguous, first added to `x` in place; or None
    weight,  # [D]
    bias,  # [D]; None for an RMS norm
    out,  # [T, H, D]
    num_rows,  # T H
    num_heads,  # H
    x_token,  # stride of the tokens in `x`, in elements
    x_head,  # stride of the heads in `x`, in elements
    out_token,  # stride of the tokens in `out`, in elements
    out_head,  # stride of the heads in `out`, in elements
    eps,
    ABOVE_ONE: tl.constexpr,  # multiply by 1 + weight
    DIM: tl.constexpr,  # D
    SIZE: tl.constexpr,  # D rounded up to a power of two
    ROWS: tl.constexpr,  # rows per program
):
    """Normalize ROWS rows of D features. Grid: [num_rows / ROWS]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, SIZE)
    inside = columns < DIM
    mask = (rows < num_rows)[:, None] & inside[None, :]
    tokens = rows // num_heads
    heads = rows % num_heads
    offsets = (tokens * x_token + heads * x_head)[:, None] + columns[None, :]
    values = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if added is not None:
        values += tl.load(added + rows[:, None] * DIM + columns[None, :], mask=mask, other=0.0)
        # Normalize the rounded sum, which is the value stored in the residual stream.
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + offsets, rounded, mask=mask)
        values = rounded.to(tl.float32)
    scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if ABOVE_ONE:
        scales += 1.0
    if bias is not None:
        mean = tl.sum(values, axis=1) / DIM
        values = tl.where(mask, values - mean[:, None], 0.0)
    power = tl.sum(values * values, axis=1) / DIM
    normal = values * tl.rsqrt(power + eps)[:, None] * scales[None, :]
    if bias is not None:
        normal += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    offsets = (tokens * out_token + heads * out_head)[:, None] + columns[None, :]
    tl.store(out + offsets, normal.to(out.dtype.element_ty), mask=mask)


def _normalised(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    added: Tensor | None = None,
    above_one: bool = False,
) -> Tensor:
    """Return the norm of `x` [..., D] in a new tensor. `x` must be contiguous unless 2-D or 3-D."""
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
    """Launch `_norm_rows` for `x` and `out` of shape [T, D] or [T, H, D].

    If `added` is given, errors use the names of the public functions: `hidden` for the parameter
    `x`, and `x` for `added`.
    """
    dim, name = x.shape[-1], "x" if added is None else "hidden"
    check(name, x, [*"TH"[: x.dim() - 1], dim], FLOATS)
    check("weight", weight, [dim], [x.dtype], like=x)
    if bias is not None:
        check("bias", bias, [dim], [x.dtype], like=x)
    if added is not None:
        check("x", added, list(x.shape), [x.dtype], like=x)
        added = added.contiguous()
    if not 0 < dim <= MAX_FEATURES:
        raise ValueError(f"{name}: rows of 1 to {MAX_FEATURES} features expected, not of {dim}")
    x, out = (each[:, None] if each.dim() == 2 else each for each in (x, out))
    size = power_of_2(dim)
    rows = max(1, TILE // size)
    launch(
        _norm_rows,
        (-(-x.shape[0] * x.shape[1] // rows),),
        x,
        added,
        weight,
        bias,
        out,
        x.shape[0] * x.shape[1],
        x.shape[1],
        *x.stride()[:2],
        *out.stride()[:2],
        eps,
        ABOVE_ONE=above_one,
        DIM=dim,
        SIZE=size,
        ROWS=rows,
        num_warps=device_info(x).warps(max(128, min(512, size // 32))),
    )


def aot_cases() -> Iterator[AotCase]:
    streams = ("_norm_rows",)
    weight = meta(4096)
    yield AotCase("rms 4096", lambda: rms_norm(meta(64, 4096), weight, 1e-5), streams=streams)
    yield AotCase(
        "add and rms 4096",
        lambda: fused_add_rms_norm(meta(64, 4096), meta(64, 4096), weight, 1e-5),
        streams=streams,
    )
    yield AotCase(
        "add and rms above one 3584",
        lambda: fused_add_gemma_rms_norm(meta(64, 3584), meta(64, 3584), meta(3584), 1e-6),
        streams=streams,
    )
    yield AotCase(
        "add and layer 8192",
        lambda: fused_add_layer_norm(meta(64, 8192), meta(64, 8192), meta(8192), meta(8192), 1e-5),
        streams=streams,
    )
    yield AotCase(
        "heads 128, in place",
        lambda: rms_norm_(meta(64, 48, 128)[:, :32], meta(128), 1e-6),
        streams=streams,
    )
