"""Rotary position embedding (Su et al., 2021).

The features of a pair are half a head apart, (i, i + R/2), as in Llama, or interleaved,
(2i, 2i + 1), as in GPT-J. A pair (u, v) at position p is rotated by the angle a = p * frequency:

    u' = u cos a - v sin a
    v' = v cos a + u sin a

`rotate_` rotates all R features of its argument, usually a view of the first R features of every
head. On a GPU, the arithmetic is float32. `kv_cache/op.rope_and_cache` rotates heads and also
writes them to the KV cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.triton_common.aot import AotCase, meta
from penstock.kernels.triton_common.launch import (
    FLOATS,
    check,
    check_contiguous,
    device_info,
    jit,
    launch,
    power_of_2,
    tl,
    use_triton,
)

TILE, THREADS = 2048, 128
"""Features and threads per program. Each thread moves 8 features (16 bytes in bfloat16) of each
half of a head."""


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
        scale: all cosines and sines are multiplied by this.
        interleaved: True if feature pairs are (2i, 2i + 1), False if they are (i, i + R/2).

    Returns:
        [num_positions, 2, R]. For each position, row 0 holds the cosine for each feature, row 1
        the sine for each feature, negated for the first feature of each pair.
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
    """Rotate `x` [T, H, R] in place. `cos_sin` [T, 2, R] holds the tokens' rows of `rotary_table`.

    `cos_sin` must have the dtype of `x`. On a GPU, it may also be float32.
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


@jit
def load_rotated(
    source,  # [N, 1] pointers to heads
    cos_sin,  # [N, 1] pointers to the cosines and sines [2, R] of each head
    mask,  # [N, 1]
    HALF: tl.constexpr,  # R/2
    PAIRS: tl.constexpr,  # R/2 rounded up to a power of two
    INTERLEAVED: tl.constexpr,
):
    """Load N heads and return the rotated pairs (u', v') as two float32 tensors [N, PAIRS]."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        inside = mask & (both < 2 * HALF)
        x = tl.load(source + both, mask=inside, other=0.0).to(tl.float32)
        cosines = tl.load(cos_sin + both, mask=inside, other=0.0).to(tl.float32)
        sines = tl.load(cos_sin + 2 * HALF + both, mask=inside, other=0.0).to(tl.float32)
        u, v = tl.split(x.reshape(x.shape[0], PAIRS, 2))
        cos, _ = tl.split(cosines.reshape(x.shape[0], PAIRS, 2))
        _, sin = tl.split(sines.reshape(x.shape[0], PAIRS, 2))
    else:
        pairs = tl.arange(0, PAIRS)[None, :]
        inside = mask & (pairs < HALF)
        u = tl.load(source + pairs, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(source + HALF + pairs, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_sin + pairs, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(cos_sin + 3 * HALF + pairs, mask=inside, other=0.0).to(tl.float32)
    return u * cos - v * sin, v * cos + u * sin


@jit
def store_rotated(
    target,  # [N, 1] pointers to heads
    u,  # [N, PAIRS] first features of the pairs
    v,  # [N, PAIRS] second features of the pairs
    mask,  # [N, 1]
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Store the pairs of N heads in the layout that `load_rotated` reads.

    `target` may point to the heads that `load_rotated` has read, because each thread only writes
    elements that the same thread has read.
    """
    u, v = u.to(target.dtype.element_ty), v.to(target.dtype.element_ty)
    if INTERLEAVED:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.join(u, v).reshape(u.shape[0], 2 * PAIRS)
        tl.store(target + both, x, mask=mask & (both < 2 * HALF))
    else:
        pairs = tl.arange(0, PAIRS)[None, :]
        inside = mask & (pairs < HALF)
        tl.store(target + pairs, u, mask=inside)
        tl.store(target + HALF + pairs, v, mask=inside)


@jit(unspecialized=("num_tokens",))
def _rotate_heads(
    x,  # [T, H, R]
    cos_sin,  # [T, 2, R]
    num_tokens,
    num_heads,
    token_stride,
    head_stride,
    HALF: tl.constexpr,  # R/2
    PAIRS: tl.constexpr,  # R/2 rounded up to a power of two
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens per program
    HEADS: tl.constexpr,  # heads per program
):
    """Rotate TOKENS x HEADS heads of x in place. Grid: [T / TOKENS, H / HEADS]."""
    rows = tl.arange(0, TOKENS * HEADS)[:, None]
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + rows // HEADS
    heads = tl.program_id(1) * HEADS + rows % HEADS
    mask = (tokens < num_tokens) & (heads < num_heads)
    pointers = x + tokens * token_stride + heads * head_stride
    u, v = load_rotated(pointers, cos_sin + tokens * (4 * HALF), mask, HALF, PAIRS, INTERLEAVED)
    store_rotated(pointers, u, v, mask, HALF, PAIRS, INTERLEAVED)


def check_rotary(cos_sin: Tensor, num_tokens: int, dim: int, like: Tensor) -> None:
    """Raise ValueError unless `cos_sin` is [num_tokens, 2, R], with R even and in [2, dim]."""
    check("cos_sin", cos_sin, [num_tokens, 2, "R"], [like.dtype, torch.float32], like=like)
    check_contiguous("cos_sin", cos_sin)
    num_rotated = cos_sin.shape[2]
    if num_rotated % 2 or not 0 < num_rotated <= dim:
        raise ValueError(f"cos_sin: an even number of at most {dim} features, not {num_rotated}")


def rows_of_a_tile(num_heads: int, dim: int) -> tuple[int, int]:
    """Return (tokens per program, heads per program); both are powers of two."""
    rows = max(1, TILE // power_of_2(dim))
    heads = min(rows, power_of_2(num_heads))
    return rows // heads, heads


def _rotate(x: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    check("x", x, ["T", "H", "R"], FLOATS)
    num_tokens, num_heads, dim = x.shape
    check_rotary(cos_sin, num_tokens, dim, x)
    if cos_sin.shape[2] != dim:
        raise ValueError(f"cos_sin: {dim} features expected, as x has, not {cos_sin.shape[2]}")
    tokens, heads = rows_of_a_tile(num_heads, dim)
    launch(
        _rotate_heads,
        (-(-num_tokens // tokens), -(-num_heads // heads)),
        x,
        cos_sin,
        num_tokens,
        num_heads,
        *x.stride()[:2],
        HALF=dim // 2,
        PAIRS=power_of_2(dim // 2),
        INTERLEAVED=interleaved,
        TOKENS=tokens,
        HEADS=heads,
        num_warps=device_info(x).warps(THREADS),
    )


def aot_cases() -> Iterator[AotCase]:
    streams = ("_rotate_heads",)
    heads, angles = meta(64, 128, 192)[:, :, 128:], meta(64, 2, 64)
    yield AotCase("latent queries, halves", lambda: rotate_(heads, angles), streams=streams)
    yield AotCase("latent queries, pairs", lambda: rotate_(heads, angles, True), streams=streams)
