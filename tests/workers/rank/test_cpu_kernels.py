"""A worker loads required CPU kernels before the warm-up, and deferred kernels after it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.kernels.cpu_common.numba_runtime import has_numba
from penstock.kernels.cpu_compilation import CpuKernelNeeds, KernelGroup
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.rank import cpu_kernels
from penstock.workers.rank.cpu_kernels import load_cpu_kernels
from tests.support.tiny import tiny_checkpoint

pytestmark = pytest.mark.skipif(not has_numba(), reason="numba is not installed")

NEEDS = CpuKernelNeeds("float32", "float32")


class Background:
    """Replaces `BackgroundLoader`, and records what is deferred and started."""

    deferred: tuple[str, ...] = ()
    num_starts = 0

    def __init__(self, needs: CpuKernelNeeds, groups: Sequence[KernelGroup]) -> None:
        type(self).deferred = tuple(each.name for each in groups)

    def start(self) -> None:
        type(self).num_starts += 1


@pytest.fixture(autouse=True)
def background(monkeypatch: pytest.MonkeyPatch) -> type[Background]:
    class Recorder(Background):
        pass

    def deferrable(groups: Sequence[KernelGroup], needs: Any) -> tuple[KernelGroup, ...]:
        return tuple(each for each in groups if each.name == "norms")

    monkeypatch.setattr(cpu_kernels, "BackgroundLoader", Recorder)
    monkeypatch.setattr(cpu_kernels, "deferrable_groups", deferrable)
    return Recorder


@pytest.mark.parametrize("in_background", [False, True])
def test_deferred_groups_are_not_loaded_before_the_worker_serves(
    in_background: bool, background: type[Background], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = list[str]()

    def load_now(groups: Sequence[KernelGroup], notify: object) -> None:
        at_once.extend(each.name for each in groups)

    monkeypatch.setattr(cpu_kernels, "CpuKernelLoader", load_now)
    _, later = load_cpu_kernels(NEEDS, in_background, lambda: None)
    assert (later is not None) == in_background
    assert ("norms" in at_once) == (not in_background)
    assert background.deferred == (("norms",) if in_background else ())
    assert "noise" in at_once


@pytest.mark.parametrize("in_background", [False, True])
def test_warm_up_starts_the_child_at_its_end(
    in_background: bool,
    tmp_path: Path,
    background: type[Background],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_checkpoint(tmp_path)
    engine = Engine(WorkerConfig("w", folder, kv_cache_mib=1, compile_in_background=in_background))
    step = Engine.step

    def step_before_start(engine: Engine) -> Any:
        assert background.num_starts == 0
        return step(engine)

    monkeypatch.setattr(Engine, "step", step_before_start)
    engine.warm_up()
    assert background.num_starts == in_background
