"""The shortcuts of large simulations give exactly the results of the product's own code."""

from dataclasses import replace

import pytest

from penstock.loadtests.bench.workload import Lengths, Planned
from penstock.loadtests.simulator.model.timing import Timing
from penstock.loadtests.simulator.scaling.cells import figures_of_cells, run_cells
from penstock.loadtests.simulator.scaling.cluster import Cluster, ClusterPlan
from penstock.loadtests.simulator.scaling.scalers import Static
from penstock.loadtests.simulator.scaling.workloads import sinusoid, varying
from penstock.loadtests.simulator.world import router as router_module
from penstock.loadtests.simulator.world.token_runs import SteppedRuns, append_runs
from penstock.router.routing.events import Event, Stepped
from penstock.router.routing.placement.policy import Policy, RolePolicy
from penstock.router.routing.placement.rankings.cost import CostRanking
from penstock.workers.scheduling.config import SchedulerConfig

LIMITS = SchedulerConfig(
    num_blocks=60,
    max_model_len=16384,
    block_size=64,
    max_sequences=4,
    max_batched_tokens=512,
    max_queued=10**6,
)


def load_of(seconds: float, rate: float, seed: int) -> list[Planned]:
    waves = sinusoid(0.3 * rate, rate, seconds)
    inputs, outputs = Lengths.parse("lognormal:64-1024"), Lengths.parse("lognormal:2-64")
    return varying(waves, rate, seconds, inputs, outputs, seed)


def run(plan: ClusterPlan, load: list[Planned], policy: Policy | None) -> Cluster:
    cluster = Cluster(plan, load, Static(plan.pools), policy)
    cluster.run()
    return cluster


@pytest.mark.parametrize("rate", [2.0, 12.0, 60.0])
@pytest.mark.parametrize("pools", [{"mixed": 7}, {"mixed": 2}, {"prefill": 1, "decode": 2}])
@pytest.mark.parametrize("shares_prompts", [False, True])
def test_default_placement_decides_like_the_plain_comparison(
    pools: dict[str, int], rate: float, shares_prompts: bool
) -> None:
    """At the highest rate, all workers are full: requests wait, and some do not fit."""
    plan = ClusterPlan(pools, LIMITS, Timing())
    load = load_of(4.0, rate, seed=int(rate))
    if shares_prompts:
        load = [replace(one, blocks=(one.number % 3, one.number)) for one in load]
    default, compared = run(plan, load, None), run(plan, load, RolePolicy(CostRanking()))
    assert default.calls == compared.calls
    assert default.num_steps == compared.num_steps


def test_requests_go_where_their_prefix_is_cached() -> None:
    """Each prompt begins with one of three documents of 512 tokens."""
    plan = ClusterPlan({"mixed": 4}, replace(LIMITS, num_blocks=400), Timing())
    load = [
        Planned(number, 0.5 * number, 1000, 2, (number % 3, 10 + number)) for number in range(40)
    ]
    cached = {}
    for routing in ("cost", "round_robin"):
        cluster = run(replace(plan, routing=routing), load, None)
        loads = [worker.batcher.load() for worker in cluster._live.values()]
        cached[routing] = sum(each.prompt_tokens_cached for each in loads)
    assert cached["cost"] >= 36 * 512 > 28 * 512 >= cached["round_robin"]


def test_runs_of_tokens_are_those_of_single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ClusterPlan({"mixed": 3}, replace(LIMITS, num_blocks=400), Timing())
    load = load_of(4.0, 6.0, seed=1)
    sizes: list[int] = []

    def counted(runs: SteppedRuns, *others: object) -> Stepped:
        left = append_runs(runs, *others)  # type: ignore[arg-type]
        sizes.append(runs.end - runs.first - len(left.tokens))
        return left

    monkeypatch.setattr(router_module, "append_runs", counted)
    at_once = run(plan, load, None)
    assert sum(size > 0 for size in sizes) > 10, "no runs were appended at once"

    def whole(router: router_module.Router, event: Event | SteppedRuns) -> Event:
        return event.whole() if isinstance(event, SteppedRuns) else event

    monkeypatch.setattr(router_module.Router, "append_runs", whole)
    one_by_one = run(plan, load, None)
    assert at_once.calls == one_by_one.calls
    assert at_once.clock.num_events == one_by_one.clock.num_events


def test_cells_give_the_results_of_clusters_of_their_own() -> None:
    plan = ClusterPlan({"mixed": 4}, LIMITS, Timing())
    load = load_of(4.0, 6.0, seed=1)
    cells = run_cells(plan, load, 2)
    half = replace(plan, pools={"mixed": 2})
    alone = [run(half, load[first::2], None) for first in (0, 1)]
    assert [cell.calls for cell in cells] == [one.calls for one in alone]
    merged = figures_of_cells(cells, plan)
    assert merged.most_workers == 4
    assert merged.worker_hours * 3600 == sum(one.worker_seconds for one in alone)
    assert 0 < merged.busy < 1
