"""Compare paged-attention kernels with the reference, with tiles so small that edge cases occur."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention import triton_plan, work_items
from penstock.kernels.attention.op import (
    paged_attention,
    paged_attention_reference,
    plan_attention,
)
from penstock.kernels.attention.score_mod import PLAIN, ScoreMod
from penstock.kernels.attention.triton_configs import Tiles
from penstock.kernels.kv_cache.format import FORMATS, dequantize, to_cache
from tests.support.batches import Batch, make_batch, poison
from tests.support.devices import DEVICE, exact_products

SPLIT = 32
PARTS, CHUNKS, FIXED = Tiles(16, 16, 4, 1), Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1)


@contextmanager
def small_tiles(plan: ModuleType = triton_plan, items: ModuleType = work_items) -> Iterator[None]:
    """Use small tiles, so that tests cover tile edges, and fill new tensors with NaN."""
    with ExitStack() as stack:
        for module, name, value in (
            (work_items, "SPLIT", SPLIT),
            (items, "SPLIT", SPLIT),
            (items, "QUANTUM", SPLIT // 2),
            (items, "CHUNK_SPLIT", SPLIT),
            (plan, "split_kv_tiles", lambda *_: PARTS),
            (plan, "chunk_tiles", lambda *_: CHUNKS),
            (plan, "batch_invariant_tiles", lambda *_: FIXED),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(torch, "empty", _poisoned_empty))
        yield


def _poisoned_empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    sizes = shape[0] if isinstance(shape[0], tuple) else shape
    value = torch.nan if dtype.is_floating_point else -1
    return torch.full(sizes, value, dtype=dtype, device=device)


def make_case(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype = torch.float32,
    cached: str | None = None,
) -> tuple[Tensor, Tensor, Batch]:
    """Return a query, a cache layer in the format `cached` (if None, floats), and a batch."""
    num_heads, group, head_dim = heads
    batch, num_blocks = make_batch(lengths, block_size, seed=len(lengths))
    batch = within_bounds(batch, num_blocks)
    torch.manual_seed(sum(heads))
    layer = torch.randn(2, num_blocks, num_heads, block_size, head_dim)
    poison(layer, batch)
    layer = layer.to(DEVICE, dtype)
    if cached is not None:
        layer = to_cache(layer, FORMATS[cached])
    # A strided view, like the output of a fused QKV projection.
    fused = torch.randn(int(batch[0][-1]), num_heads * (group + 2), head_dim)
    query = fused.to(DEVICE, dtype)[:, : num_heads * group]
    return query, layer, batch


def exactly(query: Tensor, layer: Tensor, batch: Batch, window: int, scores: ScoreMod) -> Tensor:
    wide = replace(
        scores,
        sinks=None if scores.sinks is None else scores.sinks.cpu().double(),
        slopes=None if scores.slopes is None else scores.slopes.cpu().double(),
    )
    wide_layer = dequantize(layer.cpu(), torch.float64)
    return paged_attention_reference(query.cpu().double(), wide_layer, *batch, window, wide)


def within_bounds(batch: Batch, num_blocks: int) -> Batch:
    """Return the batch with valid block tables, for tests of broken kernels.

    The sequence that uses block 0 gets another block instead. All unused entries of the tables, and
    one additional column, then refer to block 0, which holds NaN. A broken kernel that reads such
    an entry, or a masked block number, gets NaN and does not access memory out of bounds.
    """
    starts, contexts, tables = batch
    spare = np.setdiff1d(np.arange(num_blocks), tables)[0]
    tables = np.where(tables == 0, spare, np.where(tables < num_blocks, tables, 0))
    return starts, contexts, np.pad(tables.astype(np.int32), ((0, 0), (0, 1)))


def check(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int] = (1, 3, 16),
    block_size: int = 16,
    window: int = 0,
    scores: ScoreMod = PLAIN,
    dtype: torch.dtype = torch.float32,
    cached: str | None = None,
) -> None:
    query, layer, batch = make_case(lengths, heads, block_size, dtype, cached)
    with small_tiles():
        plan = plan_attention(*batch, layer, window)
        found = paged_attention(query, layer, plan, scores)
    compare(found, exactly(query, layer, batch, window, scores))


def check_one_path(
    lengths: list[tuple[int, int]],
    pieces: list[tuple[int, int]],
    window: int = 0,
    scores: ScoreMod = PLAIN,
    cached: str | None = None,
) -> None:
    """Check attention with `one_path=True` against the reference, and pieces against the whole.

    `pieces` are (first token, length) of parts of the first sequence. Each piece is also computed
    alone. The result must be bitwise identical to that part of the whole result.
    """
    query, layer, batch = make_case(lengths, (1, 3, 16), 16, cached=cached)
    _, contexts, tables = batch
    with small_tiles(), exact_products():
        plan = plan_attention(*batch, layer, window, one_path=True)
        whole = paged_attention(query, layer, plan, scores)
        compare(whole, exactly(query, layer, batch, window, scores))
        for begin, length in pieces:
            context = np.array([contexts[0] - lengths[0][0] + begin + length], np.int32)
            piece = (np.array([0, length], np.int32), context, tables[:1])
            tokens = slice(begin, begin + length)
            plan = plan_attention(*piece, layer, window, one_path=True)
            alike(paged_attention(query[tokens], layer, plan, scores), whole[tokens])


def shared_batch(num_tokens: int, prefix: int, contexts: list[int]) -> tuple[Batch, int]:
    """Return a batch with one token per sequence and a shared prefix, and the number of blocks.

    The first `prefix` positions of all sequences are stored in the same blocks of 16 positions.
    """
    (starts, lens, tables), num_blocks = make_batch(
        [(1, contexts[i % len(contexts)]) for i in range(num_tokens)], 16, 0
    )
    tables[:, : prefix // 16] = tables[0, : prefix // 16]
    return within_bounds((starts, lens, tables), num_blocks), num_blocks


def check_prefix(
    num_tokens: int,
    prefix: int,
    contexts: list[int],
    shared: int,
    scores: ScoreMod = PLAIN,
    window: int = 0,
    one_path: bool = False,
) -> None:
    """Check that cascade attention reads `shared` positions once, and that results are correct."""
    batch, num_blocks = shared_batch(num_tokens, prefix, contexts)
    layer = torch.randn(2, num_blocks, 1, 16, 16)
    poison(layer, batch)
    query, layer = torch.randn(num_tokens, 3, 16, device=DEVICE), layer.to(DEVICE)
    with small_tiles():
        plan = plan_attention(*batch, layer, window, one_path, use_cascade=True)
        torch.testing.assert_close(plan.backend.prefix, shared)  # type: ignore[attr-defined]
        found = paged_attention(query, layer, plan, scores)
    compare(found, exactly(query, layer, batch, window, scores))


def alike(found: Tensor, expected: Tensor) -> None:
    """Check that two tensors are equal, without tolerance."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def compare(found: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[found.dtype]
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)
