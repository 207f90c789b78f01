"""Compares whole models that run on interpreted Triton kernels with the CPU ops."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kernels.triton_common import launch
from penstock.workers.engine.model_runner import ModelRunner
from penstock.workers.kv_transfer.shards import LayerHeadRange, Shard
from penstock.workers.kv_transfer.staging import KvStaging
from penstock.workers.weights.loading import load_model
from tests.aot.case import kernel_name
from tests.support.checkpoints import make_checkpoint
from tests.support.planner import BLOCK_SIZE, Planner, make_cache

pytestmark = pytest.mark.interpreted

PROMPTS = [[9, 8, 7], list(range(20))]

KERNELS = {
    "llama3": {"attend_kernel", "_norm_kernel", "_rope_and_cache_kernel", "_gated_kernel"},
    "gemma2": {"attend_kernel", "_norm_kernel", "_rope_and_cache_kernel", "_gated_kernel"},
    "qwen3": {"attend_kernel", "_norm_kernel", "_rope_and_cache_kernel", "_gated_kernel"},
    "gpt-j": {"attend_kernel", "_norm_kernel", "_rope_and_cache_kernel"},
    "bloom": {"attend_kernel", "_norm_kernel", "_rope_and_cache_kernel"},
    "falcon-rw": {"attend_kernel", "_norm_kernel", "_rope_and_cache_kernel"},
    "gpt-oss": {
        "attend_kernel",
        "_norm_kernel",
        "_rope_and_cache_kernel",
        "_grouped_gemm_kernel",
    },
    "deepseek-v3": {
        "_norm_kernel",
        "_rope_and_cache_kernel",
        "_gated_kernel",
        "_rotate_kernel",
        "_grouped_gemm_kernel",
    },
}
"""Kernels that each model family must launch."""


@pytest.mark.parametrize("family", KERNELS)
def test_logits_match_the_cpu_ops(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, family)
    decoder = load_model(tmp_path, "auto", torch.device("cpu"))[1]
    planner = Planner(PROMPTS, max_new=1)
    plan = planner.plan(chunk=1000)
    launched = count_launches(monkeypatch)
    cache = make_cache(decoder, planner.num_blocks)
    found = ModelRunner(decoder, cache).run(plan)
    assert KERNELS[family] <= launched.keys()
    monkeypatch.setattr(launch, "INTERPRETED", False)
    expected_cache = make_cache(decoder, planner.num_blocks)
    expected = ModelRunner(decoder, expected_cache).run(plan)
    torch.testing.assert_close(cache.data, expected_cache.data, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def count_launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    launched: Counter[str] = Counter()
    run = launch.run_kernel

    def count_and_run(kernel: Any, *rest: Any) -> None:
        launched[kernel_name(kernel)] += 1
        run(kernel, *rest)

    monkeypatch.setattr(launch, "run_kernel", count_and_run)
    return launched


def test_kv_transfer_staging_uses_the_block_move_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LayerHeadRange(0, 3, 0, 4)
    source, target = (torch.randn(3, 2, 9, 4, BLOCK_SIZE, 8) for _ in range(2))
    shard = Shard(LayerHeadRange(1, 3, 2, 4), 0, 2 * BLOCK_SIZE)
    blocks = torch.tensor([7, 2], dtype=torch.int32).numpy()
    launched = count_launches(monkeypatch)
    message = KvStaging(source, whole).gather(blocks, shard)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert torch.equal(message, KvStaging(source, whole).gather(blocks, shard))
    monkeypatch.setattr(launch, "INTERPRETED", True)
    expected = target.clone()
    expected[1:3, :, [3, 5], 2:4] = source[1:3, :, [7, 2], 2:4]
    target_blocks = torch.tensor([3, 5], dtype=torch.int32).numpy()
    KvStaging(target, whole).scatter(target_blocks, shard, message)
    assert torch.equal(target, expected)
    assert launched == {"_move_blocks_kernel": 2}
