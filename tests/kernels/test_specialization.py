"""Steps of any shape use only kernels that the warm-up compiled: compiling would stall a server."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.common.sampling_params import SamplingParams
from penstock.kernels.attention.backends.interface import HostBatch
from penstock.kernels.checks import E4M3
from penstock.kernels.kv_cache.block_copy import copy_blocks, gather_blocks, scatter_blocks
from penstock.kernels.kv_cache.checksum import CHUNK, sum_words
from penstock.kernels.kv_cache.format import format_of
from penstock.kernels.linear import op as products
from penstock.kernels.linear.triton_w8a8 import tiles_for
from penstock.kernels.linear.w8a8 import quantize_activations, w8a8_matmul
from penstock.kernels.sampling.logprobs import logprobs
from penstock.kernels.sampling.op import sample
from penstock.kernels.sampling.penalties import Penalties, add_logit_bias_, apply_penalties_
from penstock.kernels.sampling.token_mask import apply_token_mask_
from penstock.kernels.triton_common.launch import INTERPRETED
from penstock.loadtests.gpu.models import SHAPES
from penstock.workers.engine.warm_up import warm_up_block_moves, warm_up_sequences
from penstock.workers.gpu.device_runner import DeviceRunner
from penstock.workers.gpu.graph_buckets import GraphBuckets
from penstock.workers.gpu.inputs import DecodeInputs, DeviceBatch
from penstock.workers.layers.packing import pack
from penstock.workers.models import model_builder
from penstock.workers.models.decoder import empty_decoder
from penstock.workers.models.spec import read_spec
from penstock.workers.rank.kv_cache import KvCache
from penstock.workers.sampling.sampler import Sampler
from penstock.workers.scheduling.config import SchedulerConfig
from tests.aot.case import SM_90, meta
from tests.support.specialized import specializations

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")

META = torch.device("meta")
SIZES = (1, 2, 3, 4, 5, 8, 15, 16, 17, 48, 100)


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return meta(*shape, dtype=dtype)


def floats(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.float32)


@torch.inference_mode()
def draw_tokens(num_rows: int) -> None:
    """Sample with parameters that are views of one tensor, as in the engine."""
    sampler = Sampler(num_rows, 1000, META)
    for row in range(num_rows):
        sampler.admit(row, SamplingParams(temperature=1.0, top_p=0.9, top_k=5), 0)
    rows = np.arange(num_rows, dtype=np.int32)
    params = sampler._sampling_tensors(sampler._params[rows], rows)
    sample(floats(num_rows, 1000), params)


def penalize(num_rows: int) -> None:
    logits, tokens = floats(num_rows, 1000), ints(num_rows, 7 * num_rows)
    each = Penalties(*(floats(num_rows) for _ in range(3)))
    apply_penalties_(logits, tokens, ints(num_rows), ints(num_rows), each)


def transfer(count: int, kv: Tensor, heads: slice) -> None:
    """Gather, scatter and checksum `count` blocks, as a KV transfer does."""
    blocks, layers = ints(count, dtype=torch.int32), slice(1, 2)
    staged = gather_blocks(kv, blocks, layers, heads)
    scatter_blocks(kv, blocks, layers, heads, staged)
    words = -(-staged.numel() * staged.itemsize // 8)
    sum_words(ints(words), ints(CHUNK + 1), ints(max(1 << 12, words)))


CALLS: dict[str, Callable[[int], object]] = {
    "draw": draw_tokens,
    "penalties": penalize,
    "biases": lambda n: add_logit_bias_(floats(n, 1000), ints(3 * n), ints(3 * n), floats(3 * n)),
    "token masks": lambda n: apply_token_mask_(
        floats(n, 1000), ints(n), ints(n, 32, dtype=torch.int32)
    ),
    "logprobs": lambda n: logprobs(floats(n, 1000), ints(n), n),
    "KV transfer": lambda n: transfer(n, meta(4, 2, 99, 8, 16, 128), slice(4, 8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_all_sizes_use_the_same_specialized_kernels(name: str) -> None:
    first = specializations(lambda: CALLS[name](7))
    assert first
    for size in SIZES:
        assert specializations(lambda: CALLS[name](size)) == first, size  # noqa: B023


@pytest.mark.parametrize("num_groups", [1, 3])
def test_products_of_quantized_activations_have_one_kernel_for_each_tile_size(
    num_groups: int,
) -> None:
    codes, scales = meta(640, 384, dtype=E4M3), floats(num_groups, 640)

    def product(num_rows: int) -> None:
        x, x_scales = quantize_activations(meta(num_rows, 384), "fp8", 384 // num_groups)
        w8a8_matmul(x, x_scales, codes, scales, dtype=torch.bfloat16)

    sizes = (1, 17, 65)
    assert len({tiles_for(SM_90, True, rows) for rows in sizes}) == len(sizes)
    warm = set.union(*(specializations(lambda: product(rows)) for rows in sizes))  # noqa: B023
    for num_rows in (*SIZES, 64, 128, 1000):
        assert specializations(lambda: product(num_rows)) <= warm, num_rows  # noqa: B023


@pytest.mark.parametrize(
    "kv_shape", [(4, 2, 99, 8, 16, 128), (2, 2, 50, 5, 8, 80), (3, 1, 99, 1, 64, 576)]
)
def test_block_moves_use_only_kernels_compiled_at_warm_up(kv_shape: tuple[int, ...]) -> None:
    """Another worker may hold any range of the KV heads, so test all ranges."""
    kv = meta(*kv_shape)
    # Replace `int`, because a tensor on the "meta" device has no value to convert.
    with mock.patch("penstock.kernels.kv_cache.checksum.int", create=True):
        warm = specializations(lambda: warm_up_block_moves(kv))
    for count in SIZES:
        found = specializations(lambda: copy_blocks(kv, ints(count), ints(count)))  # noqa: B023
        assert found <= warm
        for first, last in itertools.combinations(range(kv_shape[3] + 1), 2):
            found = specializations(lambda: transfer(count, kv, slice(first, last)))  # noqa: B023
            assert found <= warm, (count, first, last)


BUCKETS = GraphBuckets(250, 4096)
NUM_BLOCKS = 999


def runner_of(name: str, folder: Path, deterministic: bool) -> DeviceRunner:
    config = SHAPES[name].config | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_spec(folder)
    with mock.patch.object(model_builder, "runs_kernels", return_value=True):
        decoder = empty_decoder(spec, torch.bfloat16, META, deterministic)
    if deterministic:
        with mock.patch.object(products, "runs_kernels", return_value=True):
            pack(decoder, "none", deterministic)
    form = format_of(decoder.dtype)
    cache = KvCache(spec.num_layers, NUM_BLOCKS, 16, spec.kv_shape, form, META)
    return DeviceRunner(decoder, cache, BUCKETS, deterministic)


@torch.inference_mode()
def compute_chunks(runner: DeviceRunner, lengths: Sequence[int]) -> None:
    """Run a step of prefill chunks, without a CUDA graph and its static inputs."""
    total, count, longest = sum(lengths), len(lengths), max(lengths)
    ends, lens = np.cumsum([0, *lengths]).astype(np.int32), np.array(lengths, np.int32)
    runner._prepare(HostBatch(ends, lens, np.zeros((count, 0), np.int32)))
    runner._compute(
        DeviceBatch(
            tokens=int32s(total),
            positions=int32s(total),
            slots=int32s(total),
            query_starts=int32s(count + 1),
            context_lens=int32s(count),
            block_tables=int32s(count, -(-longest // 16)),
            max_query=longest,
            max_context=longest,
        )
    )


def int32s(*shape: int) -> Tensor:
    return ints(*shape, dtype=torch.int32)


CHUNKS = ([17], [1, 1, 40], [5], [33, 1, 1], [300], [700, 3], [2000, 2, 1], [1, 1, 64], [2] * 8)


@pytest.mark.parametrize(("name", "deterministic"), [("1b", False), ("moe", False), ("1b", True)])
def test_steps_use_only_kernels_compiled_at_warm_up(
    name: str, deterministic: bool, tmp_path: Path
) -> None:
    runner = runner_of(name, tmp_path, deterministic)
    inputs = DecodeInputs(BUCKETS.rows[-1], 256, 16, NUM_BLOCKS - 1, META)
    warm = set()
    for bucket in BUCKETS.buckets():
        batch = inputs.batch(bucket.rows, bucket.context)
        runner._prepare(inputs.padding_rows(bucket.rows))
        warm |= specializations(lambda: runner._compute(batch))  # noqa: B023
    limits = SchedulerConfig(NUM_BLOCKS, BUCKETS.contexts[-1], 16, 250, 8192)
    for new in warm_up_sequences(limits, compiles=True):
        length = new.num_prompt
        warm |= specializations(lambda: compute_chunks(runner, [length]))  # noqa: B023
    for lengths in CHUNKS:
        found = specializations(lambda: compute_chunks(runner, lengths))  # noqa: B023
        assert found <= warm, (lengths, {each[0] for each in found - warm})
