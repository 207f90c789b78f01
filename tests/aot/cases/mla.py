"""Cases in which `make aot` compiles the kernels of `kernels/mla` ahead of time."""

from collections.abc import Iterator

import numpy as np
import torch

from penstock.kernels.attention.triton_plan import TiledPlanner
from penstock.kernels.mla.op import mla_attention, plan_mla_on_device
from tests.aot.case import AotCase, meta


def aot_cases() -> Iterator[AotCase]:
    """Yield cases for DeepSeek V3 with 16 heads, as on one of eight ranks, and with all 128."""
    kernels = ("attend_kernel",)
    yield AotCase("deepseek v3, tp 8", lambda: _call(16, 1), kernels, kernels)
    yield AotCase("deepseek v3", lambda: _call(128, 512), kernels, kernels)
    products = ("attend_kernel", "_matmul_kernel")
    yield AotCase("deepseek v3, one path", lambda: _call(16, 512, True), products)
    float32 = torch.float32
    yield AotCase("deepseek v3, tp 8, fp32", lambda: _call(16, 512, dtype=float32))
    yield AotCase("deepseek v3, fp32", lambda: _call(128, 1, dtype=float32))
    yield AotCase("deepseek v3, fp32, one path", lambda: _call(16, 512, True, float32))


def _call(
    num_heads: int, max_query: int, one_path: bool = False, dtype: torch.dtype = torch.bfloat16
) -> None:
    layer, up = meta(1, 1024, 1, 64, 576, dtype=dtype), meta(num_heads, 256, 512, dtype=dtype)
    starts, contexts = meta(33, dtype=torch.int32), meta(32, dtype=torch.int32)
    tables = meta(32, 64, dtype=torch.int32)
    planner = TiledPlanner(one_path)
    lengths = np.ones(32, np.int32)
    lengths[-1] = max_query
    planner.prepare(np.cumsum([0, *lengths]), np.full(32, 4096), is_captured=False)
    plan = plan_mla_on_device(starts, contexts, tables, layer, 512, planner, 4096)
    query = meta(int(lengths.sum()), num_heads, 192, dtype=dtype)
    mla_attention(query, layer, up, plan, 0.1)
