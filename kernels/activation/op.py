"""The activation of a feed-forward layer, gated (Shazeer, 2020).

y = f(gate) * up, with f = silu (SwiGLU) or gelu in its tanh form (GeGLU)

gate_up is [T, 2 I], the result a new [T, I] of its dtype. A device computes in float32.

torch computes what is left over of a vector, at the end of a thread's share, by another sigmoid
than the rest: the place of an element decides about its last bit. Its exponential has no such
ends: by that everything is computed alike.
"""

import math
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

MAX_COLUMNS = 2048
"""A program, of the result."""


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Gates the second half of every row by its first.

    The first half of `gate_up` is used up: it comes from one fused product and has no other reader.
    """
    if use_triton(gate_up):
        return _gated(gate_up, "silu")
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True) * up


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """What `silu_and_mul` means, in float64; leaves its input alone."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(gate_up.dtype)


def silu_and_mul_batch_invariant(gate_up: Tensor) -> Tensor:
    """As `silu_and_mul`, every element computed alike."""
    if use_triton(gate_up):
        return _gated(gate_up, "silu")
    if _runs_on_cpu_kernel(gate_up):
        return _gate_cpu(gate_up, is_gelu=False)
    gate, up = gate_up.chunk(2, dim=-1)
    below = torch.neg(gate).exp_().add_(1)
    return torch.div(gate, below, out=below).mul_(up)


def gelu_tanh_and_mul_batch_invariant(gate_up: Tensor) -> Tensor:
    """As `gelu_tanh_and_mul`, by the loops of programs (see `program`) where those are."""
    if not use_triton(gate_up) and _runs_on_cpu_kernel(gate_up):
        return _gate_cpu(gate_up, is_gelu=True)
    return gelu_tanh_and_mul(gate_up)


def _runs_on_cpu_kernel(gate_up: Tensor) -> bool:
    """Where numba's loops are, on a CPU in float32. Nothing that the number of rows decides."""
    plain = gate_up.device.type == "cpu" and gate_up.dtype == torch.float32
    return plain and gate_up.dim() == 2 and gate_up.numel() > 0 and has_numba()


def _gate_cpu(gate_up: Tensor, is_gelu: bool) -> Tensor:
    num_rows, inner = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(num_rows, inner)
    threads = 1 if gate_up.numel() < MIN_PARALLEL_ELEMENTS else torch.get_num_threads()
    flat = gate_up.contiguous().view(-1).numpy()
    _cpu_kernels().run(flat, inner, is_gelu, out.view(-1).numpy(), threads)
    return out


def load_cpu_kernels() -> None:
    """Load the loops; compile them, the first time on a machine."""
    _cpu_kernels().load()


@cache
def _cpu_kernels() -> Any:
    configure_numba()
    from penstock.kernels.activation import cpu as gate_loops

    return gate_loops


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), every element computed alike; a new tensor."""
    return torch.neg(x).exp_().add_(1).reciprocal_()


def gelu(x: Tensor) -> Tensor:
    """gelu in its tanh form, every element computed alike, and faster than torch's; a new tensor.

    (1 + tanh u) / 2 = 1 / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
    """
    slope = -2 * math.sqrt(2 / math.pi)
    below = torch.mul(x, x).mul_(0.044715 * slope).add_(slope).mul_(x).exp_().add_(1)
    return torch.div(x, below, out=below)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """As `silu_and_mul`, with the tanh form of gelu."""
    if use_triton(gate_up):
        return _gated(gate_up, "gelu")
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate).mul_(up)


def gelu_tanh_and_mul_reference(gate_up: Tensor) -> Tensor:
    """What `gelu_tanh_and_mul` means, in float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1 + inner.tanh()) * up).to(gate_up.dtype)


def swiglu_oai(gate_up: Tensor, gain: float, limit: float) -> Tensor:
    """The gate of gpt-oss, its columns in turns (gate 0, up 0, gate 1, ...).

    y = gate sigmoid(gain gate) (up + 1), with gate <= limit and -limit <= up <= limit.
    """
    if use_triton(gate_up):
        return _gated(gate_up, "clamped", gain, limit)
    gate = gate_up[:, ::2].clamp(max=limit)
    up = gate_up[:, 1::2].clamp(-limit, limit)
    return (up + 1) * gate * sigmoid(gate * gain)


def swiglu_oai_reference(gate_up: Tensor, gain: float, limit: float) -> Tensor:
    """What it means, in float64."""
    wide = gate_up.double()
    gate, up = wide[..., ::2].clamp(max=limit), wide[..., 1::2].clamp(-limit, limit)
    return ((up + 1) * gate * (gate * gain).sigmoid()).to(gate_up.dtype)


@jit
def _gate_rows(
    gate_up,  # [T, 2 I]
    out,  # [T, I]
    row_stride,  # of gate_up
    gain,
    limit,
    KIND: tl.constexpr,  # silu, gelu, clamped
    DIM: tl.constexpr,  # I
    COLUMNS: tl.constexpr,  # a program
):
    """One row, COLUMNS of its result; [T, I / COLUMNS] programs."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    mask = columns < DIM
    source = gate_up + row * row_stride
    if KIND == "clamped":
        pairs = 2 * first + tl.arange(0, 2 * COLUMNS)
        both = tl.load(source + pairs, mask=pairs < 2 * DIM, other=0.0).to(tl.float32)
        gate, up = tl.split(both.reshape(COLUMNS, 2))
        # Comparisons that let a NaN through.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        inner = gate * gain
    else:
        gate = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(source + DIM + columns, mask=mask, other=0.0).to(tl.float32)
        inner = gate
        if KIND == "gelu":
            # (1 + tanh z) / 2 is sigmoid(2 z).
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    made = gate * tl.sigmoid(inner) * up
    tl.store(out + row * DIM + columns, made.to(out.dtype.element_ty), mask=mask)


def _gated(gate_up: Tensor, kind: str, gain: float = 1.0, limit: float = 0.0) -> Tensor:
    check("gate_up", gate_up, ["T", "2 I"], FLOATS)
    num_rows, width = gate_up.shape
    if width % 2 or not width:
        raise ValueError(f"gate_up: rows of two equal halves expected, not of {width} columns")
    dim = width // 2
    out = torch.empty(num_rows, dim, dtype=gate_up.dtype, device=gate_up.device)
    columns = min(MAX_COLUMNS, power_of_2(dim))
    launch(
        _gate_rows,
        (num_rows, -(-dim // columns)),
        gate_up,
        out,
        gate_up.stride(0),
        gain,
        limit,
        KIND=kind,
        DIM=dim,
        COLUMNS=columns,
        num_warps=device_info(gate_up).warps(128),
    )
    return out


def aot_cases() -> Iterator[AotCase]:
    streams = ("_gate_rows",)
    yield AotCase("silu 14336", lambda: silu_and_mul(meta(64, 2 * 14336)), streams=streams)
    yield AotCase("gelu 9216", lambda: gelu_tanh_and_mul(meta(64, 2 * 9216)), streams=streams)
    yield AotCase(
        "clamped silu 2880", lambda: swiglu_oai(meta(64, 5760), 1.702, 7.0), streams=streams
    )
