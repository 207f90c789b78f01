"""The product keeps the SLO of the time per token in a simulated cluster."""

from dataclasses import replace

import pytest

from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.simulator.model.timing import Timing
from penstock.loadtests.simulator.scaling.call import RecordingClient
from penstock.loadtests.simulator.scaling.cluster import Cluster, ClusterPlan
from penstock.loadtests.simulator.scaling.scalers import Static
from penstock.router.routing.dispatcher import DispatcherLimits
from penstock.workers.scheduling.config import SchedulerConfig

SLO = 0.1
TIMING = Timing(sharing=0.5)
LIMITS = SchedulerConfig(
    num_blocks=4000, max_model_len=16384, block_size=16, max_sequences=32, max_batched_tokens=2048
)
# Long answers run all the time, and a long prompt arrives every two seconds.
LOAD = sorted(
    (
        *(Planned(number, 0.1 * number, 200, 600) for number in range(8)),
        *(Planned(8 + number, 2.0 + 2.0 * number, 6000, 4) for number in range(8)),
    ),
    key=lambda each: each.due,
)


def gaps_of(pools: dict[str, int], slo: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds between two tokens of an answer, for all answers, in ascending order."""
    gaps: list[float] = []
    deliver = RecordingClient.deliver

    def record(self: RecordingClient, choice: int, position: int, token: int, finish: int) -> None:
        before = self._call.last
        deliver(self, choice, position, token, finish)
        if self._call.num_tokens > 1:
            gaps.append(self._call.last - before)

    monkeypatch.setattr(RecordingClient, "deliver", record)
    router = DispatcherLimits(10**6, 10**12, 10**12, tpot_slo_seconds=slo)
    limits = replace(LIMITS, tpot_slo_seconds=slo)
    plan = ClusterPlan(pools, limits, TIMING, router=router, is_one_machine=True, single_steps=True)
    cluster = Cluster(plan, LOAD, Static(pools))
    cluster.run()
    assert {call.status for call in cluster.calls} == {"ok"}
    return sorted(gaps)


@pytest.mark.parametrize("pools", [{"mixed": 1}, {"mixed": 2}, {"prefill": 1, "decode": 1}])
def test_gaps_between_tokens_keep_the_slo_beside_long_prompts(
    pools: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an SLO, the same load exceeds the bound."""
    for slo, is_kept in ((0.0, False), (SLO, True)):
        gaps = gaps_of(pools, slo, monkeypatch)
        assert (gaps[int(0.99 * len(gaps))] <= SLO) == is_kept
