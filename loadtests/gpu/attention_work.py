"""Benchmarks of paged attention against torch SDPA (dense K/V) and FlashInfer (paged K/V)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.attention.op import paged_attention, plan_attention
from penstock.kernels.kv_cache.format import FORMATS, to_cache
from penstock.loadtests.gpu.clock import Call
from penstock.loadtests.gpu.goals import PLAIN, Goal
from penstock.loadtests.gpu.work import Absent, Work

BLOCK_SIZE = 16
WORKSPACE_BYTES = 1 << 28  # size of FlashInfer's workspace buffer


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shape of a batch of sequences of equal length.

    The batch is one decode step, or the prefill of whole prompts.
    """

    batch: int
    context: int  # number of positions per sequence
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    prompts: bool = False  # True for prefill of whole prompts, False for one decode step
    narrow: bool = False  # whether the KV cache is FP8
    block_size: int = BLOCK_SIZE

    @property
    def num_tokens(self) -> int:
        return self.batch * (self.context if self.prompts else 1)

    @property
    def num_columns(self) -> int:
        return -(-self.context // self.block_size)

    def num_bytes(self, itemsize: int) -> float:
        """Return the number of bytes read and written.

        `itemsize` is the element size of the query, and also of the KV cache unless `narrow`.
        """
        kv = 2 * self.batch * self.context * self.kv_heads * self.head_dim
        rows = 2 * self.num_tokens * self.heads * self.head_dim
        scales = 2 * kv / self.head_dim if self.narrow else 0
        return (1 if self.narrow else itemsize) * kv + scales + itemsize * rows

    @property
    def num_flops(self) -> float:
        """FLOPs of both attention matmuls.

        For prompts, masked pairs of positions are not counted.
        """
        pairs = self.context * (self.context + 1) / 2 if self.prompts else self.context
        return 4 * self.batch * pairs * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Paged:
    """Random inputs of paged attention for one batch.

    In the shapes, T is the number of tokens, Hq of query heads, D the head dim, N the number of
    blocks, H of KV heads, S the positions per block, B the number of sequences, and M the blocks
    per sequence. A cache row has W elements: D, or more if the cache is FP8 (codes and scales).
    """

    sizes: Sizes
    query: Tensor  # [T, Hq, D]
    layer: Tensor  # keys and values, [2, N, H, S, W]
    query_starts: Tensor  # shape [B + 1], int32
    context_lens: Tensor  # [B] int32
    block_tables: Tensor  # shape [B, M], int32

    @classmethod
    def random(cls, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> "Paged":
        """Create random inputs. The blocks of each sequence are in random order."""
        num_blocks = sizes.batch * sizes.num_columns
        shape = (2, num_blocks, sizes.kv_heads, sizes.block_size, sizes.head_dim)
        step = sizes.num_tokens // sizes.batch
        tables = torch.randperm(num_blocks).view(sizes.batch, sizes.num_columns)
        layer = torch.randn(shape, device=device, dtype=dtype)
        return cls(
            sizes,
            torch.randn(sizes.num_tokens, sizes.heads, sizes.head_dim, device=device).to(dtype),
            to_cache(layer, FORMATS["fp8"]) if sizes.narrow else layer,
            torch.arange(0, sizes.num_tokens + 1, step, dtype=torch.int32, device=device),
            torch.full((sizes.batch,), sizes.context, dtype=torch.int32, device=device),
            tables.to(device, torch.int32),
        )

    def ours(self) -> Call:
        """Return a function that calls `paged_attention`."""
        starts, contexts = self.query_starts.cpu().numpy(), self.context_lens.cpu().numpy()
        plan = plan_attention(starts, contexts, self.block_tables.cpu().numpy(), self.layer)
        return lambda: paged_attention(self.query, self.layer, plan)

    def torch_dense(self) -> Call:
        """Return a function that calls torch SDPA on dense keys and values.

        The dense keys and values are gathered before the timing begins.
        """
        sizes = self.sizes
        if sizes.narrow:
            raise Absent("torch SDPA does not support an 8-bit KV cache")
        gathered = self.layer[:, self.block_tables.long()].transpose(2, 3)
        shape = (
            2,
            sizes.batch,
            sizes.kv_heads,
            sizes.num_columns * sizes.block_size,
            sizes.head_dim,
        )
        keys, values = gathered.reshape(shape)[:, :, :, : sizes.context].contiguous()
        length = sizes.num_tokens // sizes.batch
        query = self.query.view(sizes.batch, length, sizes.heads, -1).transpose(1, 2)
        return lambda: functional.scaled_dot_product_attention(
            query, keys, values, is_causal=sizes.prompts, enable_gqa=True
        )

    def flashinfer(self) -> Call:
        """Return a function that calls FlashInfer on the same cache.

        FlashInfer's name of the cache layout [N, H, S, D] is "HND".
        """
        wrapper = _flashinfer(self)
        return lambda: wrapper.run(self.query, (self.layer[0], self.layer[1]))


def _flashinfer(paged: Paged) -> Any:
    try:
        import flashinfer
    except Exception as error:
        raise Absent(f"cannot be imported: {error}") from None
    sizes, device = paged.sizes, paged.query.device
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    per_row = torch.full((sizes.batch,), sizes.num_columns, dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), per_row.cumsum(0))).to(torch.int32)
    last = torch.full((sizes.batch,), (sizes.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32)
    pages = (starts.to(device), paged.block_tables.flatten(), last.to(device))
    heads = (sizes.heads, sizes.kv_heads, sizes.head_dim, BLOCK_SIZE)
    kind = {"q_data_type": paged.query.dtype, "kv_data_type": paged.layer.dtype}
    if sizes.prompts:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(paged.query_starts, *pages, *heads, causal=True, **kind)
    else:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True
        )
        wrapper.plan(*pages, *heads, **kind)
    return wrapper


def attention_work(device: torch.device, dtype: torch.dtype, small: bool) -> Iterator[Work]:
    """Yield all benchmarks of attention."""
    rows = [
        ("decode, 64 x 4k", Sizes(64, 4096), Goal(most_us=295, least_of_peer=0.95)),
        ("decode, 1 x 32k", Sizes(1, 32768), Goal(most_us=48)),
        ("decode, 1 x 4k", Sizes(1, 4096), Goal(most_us=13)),
        ("decode, 64 x 4k, fp8", Sizes(64, 4096, narrow=True), Goal(most_us=165)),
        *(
            (f"decode, {batch} x {context // 1024}k", Sizes(batch, context), Goal(least_of_peer=1))
            for batch in (1, 16, 256)
            for context in (1024, 8192)
        ),
        ("decode, 16 x 32k", Sizes(16, 32768), Goal(least_of_peer=1)),
        ("prompt of 8k", Sizes(1, 8192, prompts=True), Goal(least_tflops=450, least_of_peer=0.95)),
        ("4 prompts of 2k", Sizes(4, 2048, prompts=True), Goal(least_of_peer=0.95)),
    ]
    for name, sizes, goal in rows:
        if small:
            sizes = Sizes(min(sizes.batch, 2), 64, 4, 2, 16, sizes.prompts, sizes.narrow)
        yield _work(f"attention, {name}", sizes, goal, device, dtype)
    yield _shared_prefix(device, dtype, small)


def _work(name: str, sizes: Sizes, goal: Goal, device: torch.device, dtype: torch.dtype) -> Work:
    def make(variant: Callable[[Paged], Call]) -> Callable[[], Call]:
        return lambda: variant(Paged.random(sizes, device, dtype))

    return Work(
        name,
        goal,
        sizes.num_bytes(dtype.itemsize),
        sizes.num_flops,
        make(Paged.ours),
        {"torch SDPA, dense": make(Paged.torch_dense), "FlashInfer": make(Paged.flashinfer)},
        warm=sizes.batch == 1 and sizes.context <= 4096,
    )


def _shared_prefix(device: torch.device, dtype: torch.dtype, small: bool) -> Work:
    """Return a benchmark that compares cascade with plain attention for a shared prefix.

    Cascade attention reads the shared prefix only once for all sequences.
    """
    batch, prefix, own = (8, 512, 32) if small else (64, 8192, 256)
    sizes = Sizes(batch, prefix + own, *((4, 2, 16) if small else ()))
    num_shared = prefix // BLOCK_SIZE

    def make(cascade: bool) -> Call:
        paged = Paged.random(sizes, device, dtype)
        tables = paged.block_tables
        tables[:, :num_shared] = tables[0, :num_shared]
        starts, contexts = paged.query_starts.cpu().numpy(), paged.context_lens.cpu().numpy()
        plan = plan_attention(
            starts, contexts, tables.cpu().numpy(), paged.layer, use_cascade=cascade
        )
        return lambda: paged_attention(paged.query, paged.layer, plan)

    position_bytes = 2 * sizes.kv_heads * sizes.head_dim * dtype.itemsize
    return Work(
        f"attention, {batch} behind a prefix of {prefix}",
        Goal(over_plain=8),
        (prefix + batch * own) * position_bytes,
        sizes.num_flops,
        lambda: make(True),
        {PLAIN: lambda: make(False)},
    )
