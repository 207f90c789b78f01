"""Triton kernel of all norms, and its launcher (see `norm/op`).

Each row is read once, normalized in float32 and written once.
"""

from torch import Tensor

from penstock.kernels.triton_common.launch import device_info, jit, launch, power_of_2, tl

MAX_FEATURES = 1 << 16
"""Maximum number of features of a row. One program has the whole row in registers."""

TILE = 4096
"""Number of features that a program normalizes. A program may therefore normalize several short
rows. Tiles depend only on D, so the result is batch-invariant."""


@jit(unspecialized=("num_rows",))
def _norm_kernel(
    x,  # [T, H, D]: T tokens, H heads (1 for [T, D]), D features
    added,  # [T, H, D] contiguous tensor that is first added to `x` in place, or None
    weight,  # [D]
    bias,  # [D]; None for an RMS norm
    out,  # [T, H, D] result
    num_rows,  # T H
    num_heads,  # H
    x_token,  # distance from a token to the next in `x`, in elements
    x_head,  # distance from a head to the next in `x`, in elements
    out_token,  # distance from a token to the next in `out`, in elements
    out_head,  # distance from a head to the next in `out`, in elements
    eps,
    ABOVE_ONE: tl.constexpr,  # True to multiply by 1 + weight instead of weight
    DIM: tl.constexpr,  # D
    SIZE: tl.constexpr,  # D rounded up to a power of two
    ROWS: tl.constexpr,  # number of rows per program
):
    """Normalize ROWS rows of D features. The grid is [num_rows / ROWS], rounded up."""
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


def norm_triton(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    above_one: bool,
) -> None:
    """Write the norm of `x` to `out`. The two tensors are [T, D] or [T, H, D] with contiguous rows.

    If given, `added` (of the shape of `x`) is first added to `x` in place. With `bias`, the norm is
    a layer norm, otherwise an RMS norm. With `above_one`, 1 is added to the weight.
    """
    if added is not None:
        added = added.contiguous()
    x, out = (each[:, None] if each.dim() == 2 else each for each in (x, out))
    num_rows, dim = x.shape[0] * x.shape[1], x.shape[2]
    size = power_of_2(dim)
    rows = max(1, TILE // size)
    launch(
        _norm_kernel,
        (-(-num_rows // rows),),
        x,
        added,
        weight,
        bias,
        out,
        num_rows,
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
