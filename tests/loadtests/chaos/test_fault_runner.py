"""An attack without a cluster: what is done where there is nothing to strike."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.cluster.pools.managed import ManagedWorker
from penstock.loadtests.chaos import fault_runner
from penstock.loadtests.chaos.cluster import Cluster
from penstock.loadtests.chaos.fault_runner import FaultRunner
from penstock.loadtests.chaos.faults import Fault, InjectedFault


class Sparing(FaultRunner):
    """Finds somebody at once, who has blocks on the way only in the last tries."""

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
    ("found_at", "said"), [(0, "there was none to strike"), (3, "worker (any)")]
)
async def test_what_cannot_be_struck_is_left_out_and_said(
    found_at: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()  # one passes at each look at the clock
    monkeypatch.setattr(
        fault_runner, "time", SimpleNamespace(monotonic=lambda: float(next(seconds)))
    )
    monkeypatch.setattr(fault_runner, "POLL_SECONDS", 0.0)
    lines: list[str] = []
    one = Sparing(cast(Cluster, None), 0.0, lines.append)
    one.found_at = found_at
    fault: Any = Fault(0, "cut blocks", "any", 0.0, 1.0)
    await one.run([fault], 60.0)
    assert lines[0].startswith("1/1: cut blocks")
    assert lines[0].endswith(said)
    assert len(one.injected) == bool(found_at)
    assert one.tries >= 3
