"""Triton kernel of the gated activations, and its launcher (see `activation/op`)."""

import torch
from torch import Tensor

from penstock.kernels.triton_common.launch import device_info, jit, launch, power_of_2, tl

MAX_COLUMNS = 2048
"""Maximum number of columns of the result per program."""


@jit
def _gated_kernel(
    gate_up,  # [T, 2 I]
    out,  # [T, I]
    row_stride,  # stride of the rows in `gate_up`, in elements
    gain,  # only for "clamped": factor of the gate inside the sigmoid
    limit,  # only for "clamped": largest gate and largest absolute value of up, see `swiglu_oai`
    KIND: tl.constexpr,  # "silu", "gelu" or "clamped"
    DIM: tl.constexpr,  # I
    COLUMNS: tl.constexpr,  # columns of the result per program
):
    """Compute COLUMNS columns of one row of the result. The grid is [T, ceil(I / COLUMNS)]."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    mask = columns < DIM
    source = gate_up + row * row_stride
    if KIND == "clamped":
        pairs = 2 * first + tl.arange(0, 2 * COLUMNS)
        both = tl.load(source + pairs, mask=pairs < 2 * DIM, other=0.0).to(tl.float32)
        gate, up = tl.split(both.reshape(COLUMNS, 2))
        # Triton's min and max would replace NaN by a number. These comparisons keep NaN.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        inner = gate * gain
    else:
        gate = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(source + DIM + columns, mask=mask, other=0.0).to(tl.float32)
        inner = gate
        if KIND == "gelu":
            # (1 + tanh z) / 2 = sigmoid(2 z). The constant is 2 sqrt(2 / pi).
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    gated = gate * tl.sigmoid(inner) * up
    tl.store(out + row * DIM + columns, gated.to(out.dtype.element_ty), mask=mask)


def gated_triton(gate_up: Tensor, kind: str, gain: float, limit: float) -> Tensor:
    """Return the gated activation [T, I] of `gate_up` [T, 2 I]; see `_gated_kernel` for `kind`."""
    num_rows, dim = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(num_rows, dim, dtype=gate_up.dtype, device=gate_up.device)
    columns = min(MAX_COLUMNS, power_of_2(dim))
    launch(
        _gated_kernel,
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
