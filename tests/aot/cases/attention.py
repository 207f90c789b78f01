"""Cases in which `make aot` compiles the kernels of `kernels/attention` ahead of time."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from penstock.kernels.attention.op import (
    paged_attention,
    plan_attention,
    plan_attention_on_device,
)
from penstock.kernels.attention.score_mod import PLAIN, ScoreMod
from penstock.kernels.attention.triton_plan import TiledPlanner
from penstock.kernels.checks import E4M3
from penstock.kernels.kv_cache.format import format_of
from tests.aot.case import CHIPS, SM_89, AotCase, meta


def aot_cases() -> Iterator[AotCase]:
    """Yield cases with batches of prefill and decode, in the shapes of common models."""
    bf16, half = torch.bfloat16, torch.float16
    yield _case("llama 8b", bf16, bf16, (8, 4, 128), 512, 0, PLAIN)
    yield _case("gemma 2", bf16, bf16, (4, 2, 256), 512, 4096, ScoreMod(cap=50.0))
    yield _case("gpt-oss, fp16", half, half, (8, 8, 64), 1, 128, ScoreMod(sinks=meta(64)))
    for name, sizes, window in (("llama 8b", (8, 4, 128), 0), ("gemma 2", (4, 2, 256), 4096)):
        yield _case(f"{name}, one path", bf16, bf16, sizes, 2048, window, PLAIN, one_path=True)
    yield _case("llama 8b, fp8 cache", bf16, E4M3, (8, 4, 128), 512, 0, PLAIN)
    capped = ScoreMod(cap=50.0)
    yield _case("gemma 2, int8 cache", bf16, torch.int8, (4, 2, 256), 512, 4096, capped)
    yield _case(
        "llama 8b, int8 cache, one path", bf16, torch.int8, (8, 4, 128), 2048, 0, PLAIN, True
    )
    yield AotCase(
        "llama 1b, shared prefix",
        _call_with_prefix,
        ("attend_kernel",),
        ("attend_kernel",),
    )
    yield from _wide_cases()


def _wide_cases() -> Iterator[AotCase]:
    """Yield cases with a head size of 512."""
    bf16, float32, name = torch.bfloat16, torch.float32, "gemma 4, global layers"
    kernels = ("attend_kernel",)
    # On sm_89, the kernels of two cases spill 16 bytes. These cases are not compiled for it.
    others = tuple(chip for chip in CHIPS if chip is not SM_89)
    yield AotCase(name, partial(_call_wide, bf16, bf16), kernels, kernels)
    yield AotCase(f"{name}, fp8 cache", partial(_call_wide, bf16, E4M3), kernels)
    one_path = partial(_call_wide, bf16, bf16, one_path=True)
    yield AotCase(f"{name}, one path", one_path, kernels, chips=others)
    yield AotCase(f"{name}, fp32", partial(_call_wide, float32, float32), chips=others)
    yield AotCase(f"{name}, fp32, int8 cache", partial(_call_wide, float32, torch.int8))


def _case(
    name: str,
    dtype: torch.dtype,
    cached: torch.dtype,
    sizes: tuple[int, int, int],
    max_query: int,
    window: int,
    scores: ScoreMod,
    one_path: bool = False,
) -> AotCase:
    num_heads, group, head_dim = sizes

    def call() -> None:
        slot = format_of(cached).slot_elements(head_dim)
        layer = meta(2, 1024, num_heads, 16, slot, dtype=cached)
        # Some sequences of this batch are split: long decodes and, if `max_query` > 1, a chunk.
        lengths = np.array([*7 * [1], max_query])
        starts, contexts = np.cumsum([0, *lengths]), np.full(8, 4100)
        tables = np.zeros((8, 257), np.int32)
        plan = plan_attention(starts, contexts, tables, layer, window, one_path)
        fused = meta(int(lengths.sum()), (group + 2) * num_heads, head_dim, dtype=dtype)
        query = fused[:, : group * num_heads]
        paged_attention(query, layer, plan, scores)

    # With a quantized cache, `attend_kernel` also reads block numbers and scales with small loads.
    # Less than half of its bytes are then read by 16-byte loads, but `streams` requires half.
    streams = [] if cached.itemsize == 1 else ["attend_kernel"]
    # With `one_path`, `merge_kernel` reads single partitions, mostly with scalar loads, so
    # `streams` does not name this kernel.
    if not one_path:
        streams.append("merge_kernel")
    return AotCase(
        name,
        call,
        products=("attend_kernel",),
        streams=tuple(streams),
    )


def _call_with_prefix() -> None:
    layer, query = meta(2, 1024, 8, 16, 64), meta(64, 32, 64)
    starts, contexts = np.arange(65, dtype=np.int32), np.full(64, 1100, np.int32)
    plan = plan_attention(starts, contexts, np.zeros((64, 69), np.int32), layer, use_cascade=True)
    paged_attention(query, layer, plan)


def _call_wide(dtype: torch.dtype, cached: torch.dtype, one_path: bool = False) -> None:
    """Compute attention for a head size of 512, which only plans on the device support."""
    layer = meta(2, 1024, 4, 16, format_of(cached).slot_elements(512), dtype=cached)
    planner = TiledPlanner(one_path)
    starts, contexts = np.array([0, 1, 513]), np.array([4096, 4096])
    planner.prepare(starts, contexts, is_captured=False)
    device_starts, device_contexts = meta(3, dtype=torch.int32), meta(2, dtype=torch.int32)
    tables = meta(2, 256, dtype=torch.int32)
    plan = plan_attention_on_device(device_starts, device_contexts, tables, layer, planner, 4096)
    paged_attention(meta(513, 32, 512, dtype=dtype), layer, plan)
