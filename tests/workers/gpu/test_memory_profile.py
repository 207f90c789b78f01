"""The memory profile measures the largest step and the graphs before the cache is allocated."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels.kv_cache.format import FORMATS
from penstock.workers.engine.model_runner import SCORED_ROWS
from penstock.workers.gpu import memory_profile
from penstock.workers.gpu.device_runner import DeviceRunner
from penstock.workers.gpu.memory_profile import (
    LOGIT_COPIES,
    StepLimits,
    graph_bytes,
    largest_step,
    profile_step_bytes,
)
from penstock.workers.weights.loading import load_model
from tests.support.checkpoints import make_checkpoint

SIZES = st.builds(
    StepLimits,
    st.integers(1, 9),
    st.integers(1, 300),
    st.integers(1, 90),
    st.sampled_from([1, 4, 16]),
)


@given(SIZES)
def test_largest_step_reaches_its_limits(sizes: StepLimits) -> None:
    plan = largest_step(sizes)
    counts = np.diff(plan.query_starts)
    most = min(sizes.num_tokens, sizes.num_sequences * sizes.model_len)
    assert len(plan.tokens) == len(plan.slots) == len(plan.positions) == counts.sum() == most
    assert counts.max() <= sizes.model_len
    assert (counts == plan.context_lens).all()
    assert (plan.slots < sizes.block_size).all()
    assert plan.block_tables.shape[1] * sizes.block_size >= counts.max()
    assert not plan.block_tables.any()


def test_graph_bytes_are_the_shared_pool_and_the_cost_of_each_graph() -> None:
    assert graph_bytes([1000, 700, 690], 35) == 300 + 34 * 10
    # The driver allocated 32 bytes for four graphs together, so each of the other 34 graphs is
    # estimated at 8 bytes.
    assert graph_bytes([1000, 700, 700, 668, 668, 668], 35) == 300 + 34 * 8
    assert graph_bytes([1000, 700], 1) == 300
    assert graph_bytes([], 35) == 0  # no graph was captured
    # As if another process freed memory during the captures.
    assert graph_bytes([1000, 1010, 1020], 35) == 0


def simulate_memory(
    monkeypatch: pytest.MonkeyPatch,
    runner: type[DeviceRunner],
    allocated: Callable[[torch.device], int],
) -> None:
    """Replace the runner and the functions of `torch.cuda` that measure memory."""
    monkeypatch.setattr(memory_profile, "DeviceRunner", runner)
    monkeypatch.setattr(memory_profile, "CudaCaptures", lambda device: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, allocated)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1000))


def test_profile_counts_the_tables_of_the_runner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path)
    decoder = load_model(tmp_path, "auto", torch.device("cpu"))[1]
    runners: list[DeviceRunner] = []

    class Runner(DeviceRunner):
        def __init__(self, *args: Any) -> None:
            runners.append(self)

        def capture(self, *args: Any) -> None:
            pass

        def run(self, *args: Any) -> torch.Tensor:
            return torch.zeros(1)

    simulate_memory(monkeypatch, Runner, lambda device: 5000 * len(runners))
    limits = StepLimits(2, 8, 32, 4)
    draw = LOGIT_COPIES * SCORED_ROWS * decoder.spec.vocab_size * 4
    assert profile_step_bytes(decoder, FORMATS["int8"], limits, False) == draw + 5000


def test_profile_leaves_neither_graphs_nor_cache_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path)
    decoder = load_model(tmp_path, "auto", torch.device("cpu"))[1]
    runners: list[weakref.ref[DeviceRunner]] = []

    class Runner(DeviceRunner):
        def capture(  # type: ignore[override]
            self, captures: object, progress: Callable[[int, int], None], rungs: object
        ) -> None:
            runners.append(weakref.ref(self))
            self._graphs = self  # type: ignore[assignment]  # a cycle, as through `_compute`
            progress(0, 2)
            progress(1, 2)

        def run(self, *args: object) -> torch.Tensor:
            assert self.cache.form is FORMATS["int8"]
            return torch.zeros(1)

    alive: list[bool] = []
    simulate_memory(monkeypatch, Runner, lambda device: 0)

    def empty_cache() -> None:
        alive.append(any(each() is not None for each in runners))

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    gc.disable()  # only the profile itself may collect garbage
    try:
        profile_step_bytes(decoder, FORMATS["int8"], StepLimits(2, 8, 32, 4), False)
    finally:
        gc.enable()
    assert alive[:2] == [True, True]
    assert not alive[-1]
