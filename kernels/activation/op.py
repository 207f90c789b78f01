"""Gated activations of a feed-forward layer (Shazeer, 2020).

    y = f(gate) * up, with f = silu (SwiGLU) or the tanh approximation of gelu (GeGLU)

`gate_up` is [T, 2 I], with one row per token; the first I columns are the gates. The result is a
new tensor [T, I] of the same dtype. On a GPU, the arithmetic is float32.

For a float32 matrix on a CPU, SwiGLU and GeGLU run the same numba loops as the CPU step graph. The
result for an element then does not depend on the element's index. torch's sigmoid uses scalar code
for the last elements of each thread's range, so the last bit of its results depends on the index.
torch's `exp` does not have this problem. Where the loops do not run, the batch-invariant SwiGLU is
therefore built from `exp`.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.activation.triton import gated_triton
from penstock.kernels.checks import FLOATS, check
from penstock.kernels.cpu_common.deferred_loops import is_deferred
from penstock.kernels.cpu_common.numba_runtime import (
    MIN_PARALLEL_ELEMENTS,
    configure_numba,
    has_numba,
)
from penstock.kernels.triton_common.launch import use_triton

LOOPS = "gates"
"""Name of the group of compiled loops, see `kernels/cpu_compilation.py`."""


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute SwiGLU. The gates (first half of `gate_up`) may be overwritten."""
    if use_triton(gate_up):
        return _gated(gate_up, "silu")
    if _runs_on_cpu_kernel(gate_up):
        return _gate_cpu(gate_up, is_gelu=False)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True) * up


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """Reference for `silu_and_mul`, in float64. `gate_up` is not changed."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(gate_up.dtype)


def silu_and_mul_batch_invariant(gate_up: Tensor) -> Tensor:
    """Compute SwiGLU so that the result for an element does not depend on the element's index."""
    if use_triton(gate_up) or _runs_on_cpu_kernel(gate_up):
        return silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    below = torch.neg(gate).exp_().add_(1)
    return torch.div(gate, below, out=below).mul_(up)


def _runs_on_cpu_kernel(gate_up: Tensor) -> bool:
    """Return whether the numba loops support this tensor, a float32 matrix on a CPU.

    The results of the loops differ from torch's results in the last bits. The decision must
    therefore not depend on the number of rows.
    """
    plain = gate_up.device.type == "cpu" and gate_up.dtype == torch.float32
    fits = plain and gate_up.dim() == 2 and gate_up.numel() > 0 and gate_up.shape[1] % 2 == 0
    return fits and has_numba() and not is_deferred(LOOPS)


def _gate_cpu(gate_up: Tensor, is_gelu: bool) -> Tensor:
    num_rows, inner = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(num_rows, inner)
    threads = 1 if gate_up.numel() < MIN_PARALLEL_ELEMENTS else torch.get_num_threads()
    flat = gate_up.contiguous().view(-1).numpy()
    _cpu_kernels().run(flat, inner, is_gelu, out.view(-1).numpy(), threads)
    return out


def load_cpu_kernels() -> None:
    """Load the numba loops from disk, or compile them if they are not cached."""
    _cpu_kernels().load()


@cache
def _cpu_kernels() -> Any:
    configure_numba()
    from penstock.kernels.activation import cpu as gate_loops

    return gate_loops


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x) in a new tensor. An element's result does not depend on its index."""
    return torch.neg(x).exp_().add_(1).reciprocal_()


def gelu(x: Tensor) -> Tensor:
    """Return gelu (tanh approximation) in a new tensor; faster than torch's gelu.

    The result for an element does not depend on the element's index. The function uses the identity
    (1 + tanh u) / 2 = 1 / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
    """
    slope = -2 * math.sqrt(2 / math.pi)
    below = torch.mul(x, x).mul_(0.044715 * slope).add_(slope).mul_(x).exp_().add_(1)
    return torch.div(x, below, out=below)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Compute GeGLU with the tanh approximation of gelu.

    The result for an element does not depend on the element's index.
    """
    if use_triton(gate_up):
        return _gated(gate_up, "gelu")
    if _runs_on_cpu_kernel(gate_up):
        return _gate_cpu(gate_up, is_gelu=True)
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate).mul_(up)


def gelu_tanh_and_mul_reference(gate_up: Tensor) -> Tensor:
    """Reference for `gelu_tanh_and_mul`, in float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1 + inner.tanh()) * up).to(gate_up.dtype)


def swiglu_oai(gate_up: Tensor, gain: float, limit: float) -> Tensor:
    """Compute the gated activation of gpt-oss.

    The columns of `gate_up` are interleaved: gate 0, up 0, gate 1, up 1, ...

    The result is gate * sigmoid(gain * gate) * (up + 1). Before this computation, gate values are
    clamped to at most `limit`, and up values to the range [-limit, limit].
    """
    if use_triton(gate_up):
        return _gated(gate_up, "clamped", gain, limit)
    gate = gate_up[:, ::2].clamp(max=limit)
    up = gate_up[:, 1::2].clamp(-limit, limit)
    return (up + 1) * gate * sigmoid(gate * gain)


def swiglu_oai_reference(gate_up: Tensor, gain: float, limit: float) -> Tensor:
    """Reference for `swiglu_oai`, in float64."""
    wide = gate_up.double()
    gate, up = wide[..., ::2].clamp(max=limit), wide[..., 1::2].clamp(-limit, limit)
    return ((up + 1) * gate * (gate * gain).sigmoid()).to(gate_up.dtype)


def _gated(gate_up: Tensor, kind: str, gain: float = 1.0, limit: float = 0.0) -> Tensor:
    check("gate_up", gate_up, ["T", "2 I"], FLOATS)
    width = gate_up.shape[1]
    if width % 2 or not width:
        raise ValueError(f"gate_up has {width} columns: expected an even number, at least 2")
    return gated_triton(gate_up, kind, gain, limit)
