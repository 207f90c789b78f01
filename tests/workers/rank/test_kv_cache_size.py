"""The number of KV blocks leaves room for other programs, and on a GPU for steps and transfers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from penstock.kernels.kv_cache.format import FORMATS
from penstock.workers.config import StepSizes, WorkerConfig
from penstock.workers.kv_transfer.buffers import BUFFER_BYTES, NUM_BUFFERS, reserved_bytes
from penstock.workers.kv_transfer.protocol.messages import MAX_PEERS
from penstock.workers.models.protocols import ModelInfo
from penstock.workers.rank import kv_cache_size
from penstock.workers.rank.kv_cache_size import choose_num_blocks

SIZES = StepSizes(block_size=64, max_sequences=4, max_batched_tokens=64)
BYTES_PER_TOKEN = 1 << 14
FREE, NEEDED = 40 << 30, 10 << 30
BF16 = FORMATS["bfloat16"]


def num_blocks(monkeypatch: pytest.MonkeyPatch, **config: Any) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, FREE))
    spec = SimpleNamespace(num_layers=2, kv_shape=(2, 8, BYTES_PER_TOKEN // 64))
    given = WorkerConfig("w", Path("m"), **config)
    device = torch.device("cuda")
    return choose_num_blocks(given, SIZES, cast(ModelInfo, spec), 99, device, BF16, lambda: NEEDED)


def test_blocks_leave_room_for_steps_buffers_and_communicators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = num_blocks(monkeypatch) * SIZES.block_size * BYTES_PER_TOKEN
    rest = FREE - NEEDED - reserved_bytes()
    assert 0.96 * rest < found <= 0.97 * rest
    assert reserved_bytes() > 2 * NUM_BUFFERS * BUFFER_BYTES["nccl"] + 2 * MAX_PEERS * (20 << 20)


def test_size_that_the_operator_sets_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_blocks(monkeypatch, kv_cache_mib=1024) == 1024


def fraction_on_cpu(monkeypatch: pytest.MonkeyPatch, **config: Any) -> float:
    """Return the fraction of the available memory that a CPU worker's cache takes."""
    monkeypatch.setattr(kv_cache_size, "available_bytes", lambda: FREE)
    spec = SimpleNamespace(num_layers=2, kv_shape=(2, 8, BYTES_PER_TOKEN // 64))
    given = WorkerConfig("w", Path("m"), **config)
    many = StepSizes(block_size=64, max_sequences=1 << 20, max_batched_tokens=1 << 20)
    num = choose_num_blocks(given, many, cast(ModelInfo, spec), 99, torch.device("cpu"), BF16)
    return num * many.block_size * BYTES_PER_TOKEN / FREE


def test_cpu_worker_leaves_memory_to_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fraction_on_cpu(monkeypatch) == pytest.approx(0.25, rel=0.01)
    assert fraction_on_cpu(monkeypatch, threads=8, max_threads=8) == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize("num_workers", [2, 4, 16])
def test_cpu_workers_of_one_machine_take_at_most_half_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    found = fraction_on_cpu(monkeypatch, threads=64 // num_workers, max_threads=64)
    assert num_workers * found == pytest.approx(0.5, rel=0.01)
