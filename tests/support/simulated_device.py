"""A CPU that acts as a GPU: it launches, captures and replays steps, and computes immediately."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.kernels.attention.backends import native
from penstock.kernels.attention.op import AttentionPlan, plan_attention
from penstock.kernels.attention.triton_plan import TiledPlanner
from penstock.kernels.mla.op import MlaPlan, plan_mla
from penstock.workers.gpu import device_runner
from penstock.workers.rank import rank_runtime

UP_DIM = 24  # `head_dim` of the test models with MLA


class Replays:
    """Stand-in for CUDA graphs that keeps the captured functions; counts captures and replays."""

    active = threading.local()

    def __init__(self, device: torch.device | None = None) -> None:
        self.captured = 0
        self.replayed = 0

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        self._run(compute)

        def replay() -> None:
            self.replayed += 1
            self._run(compute)

        return replay

    def _run(self, compute: Callable[[], None]) -> None:
        self.active.graph = True
        compute()
        self.active.graph = False


def in_graph() -> bool:
    """Return whether this thread computes a captured step."""
    return getattr(Replays.active, "graph", False)


def host_attention(
    starts: Any,
    contexts: Any,
    tables: Any,
    layer: Any,
    planner: TiledPlanner,
    max_context: int,
    window: int,
) -> AttentionPlan:
    _check_prepared(planner, starts, contexts)
    assert max_context >= contexts.max()
    assert all(each.dtype == torch.int32 for each in (starts, contexts, tables))
    batch = starts.numpy(), contexts.numpy(), tables.numpy()
    return plan_attention(*batch, layer, window, planner.one_path)


def host_latent(starts, contexts, tables, layer, rank, planner, max_context) -> MlaPlan:  # type: ignore[no-untyped-def]
    _check_prepared(planner, starts, contexts)
    assert max_context >= contexts.max()
    batch = starts.numpy(), contexts.numpy(), tables.numpy()
    return plan_mla(*batch, layer, rank, UP_DIM, planner.one_path)


def _check_prepared(planner: TiledPlanner, starts: torch.Tensor, contexts: torch.Tensor) -> None:
    """Check that the host prepared the planner with the lengths that are now on the device."""
    lengths = planner.lengths
    assert lengths is not None
    assert lengths.query_starts.tolist() == starts.tolist()
    assert lengths.context_lens.tolist() == contexts.tolist()


def simulate_device(monkeypatch: pytest.MonkeyPatch) -> list[Replays]:
    """Run engines and followers as on a GPU; return a list that collects the `Replays`."""
    made: list[Replays] = []

    def captures(device: torch.device) -> Replays:
        made.append(Replays(device))
        return made[-1]

    plan_on_host(monkeypatch)
    monkeypatch.setattr(rank_runtime, "_runs_asynchronously", lambda decoder: True)
    monkeypatch.setattr(device_runner, "CudaCaptures", captures)
    return made


def plan_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a `DeviceRunner` plan attention on the host, because the CPU kernels need this."""
    monkeypatch.setattr(native, "plan_attention_on_device", host_attention)
    monkeypatch.setattr(device_runner, "plan_mla_on_device", host_latent)
    # On a CPU, the host chooses the experts. A CUDA graph could not capture this; `Replays` can.
    monkeypatch.setattr(device_runner, "waits_for_device", lambda model: "")
