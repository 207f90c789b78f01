"""The fault runner without a cluster: a fault without effect is skipped."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.cluster.pools.managed_worker import ManagedWorker
from penstock.loadtests.chaos import fault_runner
from penstock.loadtests.chaos.cluster import Cluster
from penstock.loadtests.chaos.fault_runner import FaultRunner
from penstock.loadtests.chaos.faults import Fault, InjectedFault


class StubFaultRunner(FaultRunner):
    """A runner whose try number `found_at` takes effect; with 0, no try takes effect."""

    tries = 0
    found_at = 0

    async def _choose(self, fault: Fault) -> tuple[ManagedWorker, str]:
        return cast(ManagedWorker, None), "any"

    def _inject(self, fault: Fault, worker: ManagedWorker, moment: str) -> InjectedFault | None:
        self.tries += 1
        if self.tries != self.found_at:
            return None
        return InjectedFault(fault, moment, "w", "worker", 7, 1.0, 1.0)


@pytest.mark.parametrize(
    ("found_at", "ending"), [(0, "skipped, no effect within 20 s"), (3, "worker (any)")]
)
async def test_fault_without_effect_is_skipped_and_printed(
    found_at: int, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()  # each reading advances the clock by 1 s
    monkeypatch.setattr(
        fault_runner, "time", SimpleNamespace(monotonic=lambda: float(next(seconds)))
    )
    monkeypatch.setattr(fault_runner, "POLL_SECONDS", 0.0)
    lines: list[str] = []
    runner = StubFaultRunner(cast(Cluster, None), 0.0, lines.append)
    runner.found_at = found_at
    fault: Any = Fault(0, "cut blocks", "any", 0.0, 1.0)
    await runner.run([fault], 60.0)
    assert lines[0].startswith("1/1: cut blocks")
    assert lines[0].endswith(ending)
    assert len(runner.injected) == bool(found_at)
    assert runner.tries >= 3
