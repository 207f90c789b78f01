"""Benchmarks of memory-bound operations: norms, RoPE, gated activations, KV block copies."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.activation.op import silu_and_mul
from penstock.kernels.kv_cache.block_copy import gather_blocks, scatter_blocks
from penstock.kernels.norm.op import fused_add_rms_norm
from penstock.kernels.rope.op import rotary_table, rotate_
from penstock.loadtests.gpu.clock import Call
from penstock.loadtests.gpu.goals import Goal
from penstock.loadtests.gpu.work import Absent, Work

STREAMS = Goal(least_fraction=0.88)
MOVES = Goal(least_fraction=0.90)
EPS = 1e-5


def flashinfer() -> Any:
    """Return the module `flashinfer`. Raises Absent if it cannot be imported."""
    try:
        import flashinfer
    except Exception as error:
        raise Absent(f"cannot be imported: {error}") from None
    return flashinfer


def row_work(device: torch.device, dtype: torch.dtype, small: bool) -> Iterator[Work]:
    """Yield the benchmarks. Each reads and writes at least 64 MB unless `small`."""
    tokens, hidden = (8, 64) if small else (8192, 4096)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    yield _norm(randn, tokens, hidden, dtype.itemsize)
    yield _rotation(randn, tokens, hidden, device, dtype)
    yield _gate(randn, tokens, 2 * hidden, dtype.itemsize)
    yield from _moves(randn, device, dtype, small)


def _norm(randn: Callable[..., Tensor], tokens: int, hidden: int, itemsize: int) -> Work:
    def ours() -> Call:
        stream, x, weight = randn(tokens, hidden), randn(tokens, hidden), randn(hidden)
        return lambda: fused_add_rms_norm(stream, x, weight, EPS)

    def by_torch() -> Call:
        stream, x, weight = randn(tokens, hidden), randn(tokens, hidden), randn(hidden)

        def both() -> Tensor:
            stream.add_(x)
            return functional.rms_norm(stream, (hidden,), weight, EPS)

        return both

    def by_flashinfer() -> Call:
        stream, x, weight = randn(tokens, hidden), randn(tokens, hidden), randn(hidden)
        fused = flashinfer().fused_add_rmsnorm
        return lambda: fused(x, stream, weight, EPS)

    return Work(
        f"RMS norm of a sum, {tokens} x {hidden}",
        STREAMS,
        4 * tokens * hidden * itemsize,  # reads stream and x; writes stream and result
        0,
        ours,
        {"torch": by_torch, "FlashInfer": by_flashinfer},
    )


def _rotation(
    randn: Callable[..., Tensor],
    tokens: int,
    hidden: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Work:
    dim = min(128, hidden // 4)
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
    cos_sin = rotary_table(frequencies, tokens, dtype)

    def ours() -> Call:
        heads = randn(tokens, hidden // dim, dim)
        return lambda: rotate_(heads, cos_sin)

    def by_torch() -> Call:
        heads = randn(tokens, hidden // dim, dim)
        cos, sin = cos_sin[:, :1].chunk(2, -1)[0], cos_sin[:, 1:].chunk(2, -1)[1]

        def rotate() -> Tensor:
            low, high = heads.chunk(2, -1)
            return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

        return rotate

    num_bytes = (2 * tokens * hidden + cos_sin.numel()) * dtype.itemsize
    return Work(
        f"rotation, {tokens} x {hidden // dim} heads of {dim}",
        STREAMS,
        num_bytes,
        0,
        ours,
        {"torch": by_torch},
    )


def _gate(randn: Callable[..., Tensor], tokens: int, inner: int, itemsize: int) -> Work:
    def ours() -> Call:
        gate_up = randn(tokens, 2 * inner)
        return lambda: silu_and_mul(gate_up)

    def by_torch() -> Call:
        gate_up = randn(tokens, 2 * inner)

        def both() -> Tensor:
            gate, up = gate_up.chunk(2, -1)
            return functional.silu(gate) * up

        return both

    def by_flashinfer() -> Call:
        gate_up, fused = randn(tokens, 2 * inner), flashinfer().silu_and_mul
        return lambda: fused(gate_up)

    return Work(
        f"gate of silu, {tokens} x {inner}",
        STREAMS,
        3 * tokens * inner * itemsize,
        0,
        ours,
        {"torch": by_torch, "FlashInfer": by_flashinfer},
    )


def _moves(
    randn: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, small: bool
) -> Iterator[Work]:
    """Yield benchmarks of gathering and scattering KV blocks.

    There are 8 heads of 128 features and 16 positions per block. In bfloat16, each of K and V has 4
    KB per head and 32 KB per layer of a block.
    """
    layers, count = (2, 3) if small else (8, 256)
    shape = (layers, 2, 2 * count, 8, 16, 128)
    everything = slice(0, layers), slice(0, 8)
    num_bytes = 2 * layers * 2 * count * 8 * 16 * 128 * dtype.itemsize

    def gather(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Call]:
        def make() -> Call:
            kv, blocks = randn(*shape), torch.randperm(2 * count)[:count].to(device, torch.int32)
            return lambda: function(kv, blocks)

        return make

    def scatter(function: Callable[[Tensor, Tensor, Tensor], object]) -> Callable[[], Call]:
        def make() -> Call:
            kv, blocks = randn(*shape), torch.randperm(2 * count)[:count].to(device, torch.int32)
            staged = gather_blocks(kv, blocks, *everything)
            return lambda: function(kv, blocks, staged)

        return make

    yield Work(
        f"gather of {count} blocks",
        MOVES,
        num_bytes,
        0,
        gather(lambda kv, blocks: gather_blocks(kv, blocks, *everything)),
        {"torch": gather(lambda kv, blocks: kv.index_select(2, blocks))},
    )
    yield Work(
        f"scatter to {count} blocks",
        MOVES,
        num_bytes,
        0,
        scatter(lambda kv, blocks, staged: scatter_blocks(kv, blocks, *everything, staged)),
        {"torch": scatter(lambda kv, blocks, staged: kv.index_copy_(2, blocks.long(), staged))},
    )
