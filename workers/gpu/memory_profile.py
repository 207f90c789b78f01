"""Measures the GPU memory that steps and CUDA graphs need in addition to weights and KV cache."""

import gc
from dataclasses import dataclass

import numpy as np
import torch

from penstock.kernels.attention.backends.interface import AttentionBackend
from penstock.kernels.kv_cache.format import KvCacheFormat
from penstock.workers.engine.model_runner import SCORED_ROWS
from penstock.workers.gpu.cuda_graphs import CudaCaptures
from penstock.workers.gpu.device_runner import DeviceRunner
from penstock.workers.gpu.graph_buckets import GraphBuckets
from penstock.workers.models.protocols import Model
from penstock.workers.rank.kv_cache import KvCache
from penstock.workers.scheduling.sequence import StepPlan

LOGIT_COPIES = 6
"""Number of float32 copies of a full batch's logits that exist at once during sampling with all
filters (scaled logits, sorted values and their indices, probabilities, noise). Scoring a prompt's
tokens needs less."""


MEASURED_GRAPHS = 8
"""Number of graphs that are captured to estimate the memory of all."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Upper limits of a step."""

    num_sequences: int
    num_tokens: int
    model_len: int
    block_size: int


def profile_step_bytes(
    decoder: Model,
    form: KvCacheFormat,
    sizes: StepLimits,
    deterministic: bool,
    attention: AttentionBackend | None = None,
) -> int:
    """Return the total bytes that the largest step, sampling and all CUDA graphs need.

    `decoder` must be on a CUDA device; `form` is the format of its KV cache.
    """
    spec, device = decoder.spec, decoder.device
    several = bool(attention and attention.grids_follow_context)
    ladder = GraphBuckets(sizes.num_sequences, sizes.model_len, several)
    # All positions share block 0, because the KV's content does not matter. Block 1 is scratch.
    num_blocks = 2
    cache = KvCache(
        spec.num_layers,
        num_blocks,
        sizes.block_size,
        spec.kv_shape,
        form,
        device,
    )
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    # The runner allocates its rotary tables, which are measured with the step.
    runner = DeviceRunner(decoder, cache, ladder, deterministic, attention)
    runner.run(largest_step(sizes))
    step = torch.cuda.max_memory_allocated(device) - before
    free: list[int] = []

    def look(done: int, total: int) -> None:
        """Record the device's free memory."""
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info(device)[0])

    rungs = ladder.buckets()
    runner.capture(CudaCaptures(device), look, rungs[:MEASURED_GRAPHS])
    num_rows = max(sizes.num_sequences, SCORED_ROWS)
    draw = LOGIT_COPIES * num_rows * spec.vocab_size * 4
    runner.drop_graphs()
    del runner, cache
    gc.collect()  # free the graphs' memory before the caller reads the free memory
    torch.cuda.empty_cache()
    return step + draw + graph_bytes(free, len(rungs))


def graph_bytes(free: list[int], num_graphs: int) -> int:
    """Estimate the bytes of `num_graphs` graphs that share a memory pool.

    The first graph allocates the pool. Every later graph counts as the mean of the later graphs
    that were measured, because the driver allocates in large steps.

    Args:
        free: free memory before the first capture and after each measured capture, largest graph
            first.
        num_graphs: number of graphs that will be captured.
    """
    if len(free) < 2:
        return 0
    pool = max(0, free[0] - free[1])
    num_others = len(free) - 2
    others = max(0, free[1] - free[-1])
    return pool + (-(-(num_graphs - 1) * others // num_others) if num_others else 0)


def largest_step(sizes: StepLimits) -> StepPlan:
    """Return the plan of a full step of prompts from position 0; all sequences use block 0."""
    lengths: list[int] = []
    left = sizes.num_tokens
    while left and len(lengths) < sizes.num_sequences:
        lengths.append(min(left, sizes.model_len))
        left -= lengths[-1]
    counts = np.array(lengths, np.int32)
    positions = np.concatenate([np.arange(count, dtype=np.int32) for count in lengths])
    num_columns = -(-int(counts.max()) // sizes.block_size)
    return StepPlan(
        number=0,
        rows=np.arange(len(counts), dtype=np.int32),
        tokens=np.zeros(len(positions), np.int32),
        positions=positions,
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=counts,
        block_tables=np.zeros((len(counts), num_columns), np.int32),
        slots=positions % sizes.block_size,
        samples=np.ones(len(counts), np.bool_),
    )
