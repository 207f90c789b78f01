"""Deterministic mode with Triton kernels: results are bitwise identical for all schedules.

The tests run interpreted on a CPU (`make kernels`), or on a GPU with CUDA graphs (`make gpu`).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from penstock.kernels.attention import work_items
from penstock.kernels.linear.w8a8 import has_w8a8_products
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.gpu.cuda_graphs import CudaCaptures
from penstock.workers.gpu.device_runner import DeviceRunner
from penstock.workers.layers import packing
from penstock.workers.rank import rank_runtime
from tests.support.devices import DEVICE, ON_GPU, exact_products, runs_kernels
from tests.support.ranks import make_model
from tests.support.schedule_player import (
    SMALL_CHUNKS,
    few_requests,
    play,
    run_all_schedules_after_warm_up,
)

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not runs_kernels(), reason="needs TRITON_INTERPRET=1, or a GPU"),
]

FAMILIES = ("llama", *(("gpt-oss", "deepseek") if ON_GPU else ()))
"""A dense model; a model with a sliding window, sinks and grouped experts; a model with MLA. The
last two take minutes to interpret, so on a CPU only tests of single kernels cover their
features."""

DTYPES = ("float32", "bfloat16") if ON_GPU else ("float32",)
SPLIT = 32  # positions per partition; a request has several partitions


@pytest.fixture(autouse=True)
def _small_partitions_and_exact_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(work_items, "SPLIT", 64 if ON_GPU else SPLIT)
    with exact_products():
        yield


class Replays:
    """Captures functions as CUDA graphs (on a CPU, it stores the functions); counts the replays."""

    def __init__(self) -> None:
        self.replayed = 0
        self._graphs = CudaCaptures(DEVICE) if ON_GPU else None

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        captured = compute if self._graphs is None else self._graphs.capture(compute)

        def replay() -> None:
            self.replayed += 1
            captured()

        return replay


def make_engine(
    folder: Path, dtype: str, replays: Replays | None, quantization: str = "none"
) -> Engine:
    """Return an engine; `replays`, if given, captures the engine's decode steps."""
    config = WorkerConfig(
        "w",
        folder,
        dtype=dtype,
        device=DEVICE.type,
        deterministic=True,
        quantization=quantization,
        kv_cache_mib=2,
        block_size=4,
        max_sequences=6,
        max_batched_tokens=48,
    )
    with mock.patch.object(
        rank_runtime, "_runs_asynchronously", return_value=bool(replays or ON_GPU)
    ):
        engine = Engine(config)
    torch.nn.init.constant_(engine.cache.data, torch.nan)
    if replays:
        assert isinstance(engine.executor.runner, DeviceRunner)
        engine.executor.runner.capture(replays)
    return engine


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_equal_in_any_schedule(family: str, dtype: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / family, family, num_hidden_layers=2)
    engine = make_engine(folder, dtype, None)
    expected, *others = run_all_schedules_after_warm_up(engine)
    assert all(found == expected for found in others)
    # A second engine replays decode steps as captured graphs, with padding rows.
    replays = Replays()
    captured = make_engine(folder, dtype, replays)
    assert play(captured, few_requests(engine.spec.vocab_size), SMALL_CHUNKS) == expected
    assert replays.replayed > 4


@pytest.mark.long  # five minutes in the interpreter
def test_bits_are_equal_in_any_schedule_with_fp8_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_w8a8_products("fp8", DEVICE):
        pytest.skip("the GPU has no tensor cores for FP8")
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    folder = make_model(tmp_path, "llama", num_hidden_layers=2)
    engine = make_engine(folder, DTYPES[-1], None, "fp8")
    expected, *others = run_all_schedules_after_warm_up(engine)
    assert all(found == expected for found in others)
    replays = Replays()
    captured = make_engine(folder, DTYPES[-1], replays, "fp8")
    assert play(captured, few_requests(engine.spec.vocab_size), SMALL_CHUNKS) == expected
    assert replays.replayed > 4
