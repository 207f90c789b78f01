"""Rotary position embedding (Su et al., 2021).

The embedding rotates pairs of features. The features of a pair are R/2 apart, (i, i + R/2), as in
Llama, or interleaved, (2i, 2i + 1), as in GPT-J. A pair (u, v) at position p is rotated by the
angle a = p * frequency:

    u' = u cos a - v sin a
    v' = v cos a + u sin a

`rotate_` rotates all R features of its argument, usually a view of the first R features of every
head. On a GPU, the arithmetic is float32. `kv_cache/op.rope_and_cache` rotates heads and also
writes them to the KV cache.
"""

import torch
from torch import Tensor

from penstock.kernels.checks import FLOATS, check, check_contiguous
from penstock.kernels.rope.triton import rotate_triton_
from penstock.kernels.triton_common.launch import use_triton


def rotary_table(
    frequencies: Tensor,
    num_positions: int,
    dtype: torch.dtype,
    scale: float = 1.0,
    interleaved: bool = False,
) -> Tensor:
    """Return the cosines and sines of every position, in the layout that `rotate_` reads.

    Args:
        frequencies: [R/2] float32.
        num_positions: number of positions, from 0.
        dtype: dtype of the result.
        scale: factor of all cosines and sines.
        interleaved: True if feature pairs are (2i, 2i + 1), False if they are (i, i + R/2).

    Returns:
        [num_positions, 2, R]. For each position, row 0 has the cosine for each feature, and row 1
        has the sine for each feature. The sine is negated for the first feature of each pair.
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=frequencies.device)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if interleaved:
        cosines, sines = torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)
        both = torch.stack((cosines.flatten(-2), sines.flatten(-2)), dim=1)
    else:
        both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    return (both * scale).to(dtype)


def rotate_(x: Tensor, cos_sin: Tensor, interleaved: bool = False) -> None:
    """Rotate `x` [T, H, R] in place. `cos_sin` [T, 2, R] are the tokens' rows of `rotary_table`.

    `cos_sin` must have the dtype of `x`. On a GPU, `cos_sin` may also be float32.
    """
    if use_triton(x):
        _rotate(x, cos_sin, interleaved)
        return
    if interleaved:
        swapped = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        low, high = x.chunk(2, dim=-1)
        swapped = torch.cat((high, low), dim=-1)
    x.mul_(cos_sin[:, :1]).addcmul_(swapped, cos_sin[:, 1:])


def rotate_reference(
    x: Tensor, positions: Tensor, frequencies: Tensor, interleaved: bool = False
) -> Tensor:
    """Reference for `rotate_`, in float64.

    `x` is [T, H, R], `positions` is [T] and `frequencies` is [R/2].
    """
    angles = positions.double()[:, None, None] * frequencies.double()
    wide, cos, sin = x.double(), angles.cos(), angles.sin()
    if interleaved:
        u, v = wide[..., ::2], wide[..., 1::2]
        rotated = torch.stack((u * cos - v * sin, v * cos + u * sin), dim=-1).flatten(-2)
    else:
        u, v = wide.chunk(2, dim=-1)
        rotated = torch.cat((u * cos - v * sin, v * cos + u * sin), dim=-1)
    return rotated.to(x.dtype)


def check_rotary(cos_sin: Tensor, num_tokens: int, dim: int, like: Tensor) -> None:
    """Raise ValueError unless `cos_sin` is [num_tokens, 2, R], with R even and in [2, dim]."""
    check("cos_sin", cos_sin, [num_tokens, 2, "R"], [like.dtype, torch.float32], like=like)
    check_contiguous("cos_sin", cos_sin)
    num_rotated = cos_sin.shape[2]
    if num_rotated % 2 or not 0 < num_rotated <= dim:
        raise ValueError(
            f"cos_sin has {num_rotated} features: expected an even number from 2 to {dim}"
        )


def _rotate(x: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    check("x", x, ["T", "H", "R"], FLOATS)
    num_tokens, _, dim = x.shape
    check_rotary(cos_sin, num_tokens, dim, x)
    if cos_sin.shape[2] != dim:
        raise ValueError(f"cos_sin has {cos_sin.shape[2]} features: expected {dim}, as many as x")
    rotate_triton_(x, cos_sin, interleaved)
