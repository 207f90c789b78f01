"""Fast-forwarding over steps gives exactly the results of simulating each step."""

from collections import Counter
from dataclasses import replace

import pytest

from penstock.cluster.autoscaling.autoscaler import PoolLimits
from penstock.loadtests.bench.workload import Lengths, Planned
from penstock.loadtests.simulator.faults.schedule_run import InvariantViolated, ScheduleRun
from penstock.loadtests.simulator.faults.schedules import schedule_of
from penstock.loadtests.simulator.model.timing import Timing
from penstock.loadtests.simulator.scaling.cluster import Cluster, ClusterPlan
from penstock.loadtests.simulator.scaling.goals import figures
from penstock.loadtests.simulator.scaling.scalers import PenstockScaler, Scaler, Static
from penstock.loadtests.simulator.scaling.workloads import replicated, sinusoid, varying
from penstock.loadtests.simulator.world.shared_cores import SharedCores
from penstock.router.routing.dispatcher import DispatcherLimits as RouterLimits
from penstock.workers.scheduling.config import SchedulerConfig

LIMITS = SchedulerConfig(
    num_blocks=400,
    max_model_len=16384,
    block_size=64,
    max_sequences=16,
    max_batched_tokens=1024,
    max_queued=10**6,
)


def load_of(seconds: float, rate: float, seed: int = 1) -> list[Planned]:
    waves = sinusoid(0.3 * rate, rate, seconds)
    inputs, outputs = Lengths.parse("lognormal:64-2048"), Lengths.parse("lognormal:8-512")
    return varying(waves, rate, seconds, inputs, outputs, seed)


def simulated(plan: ClusterPlan, load: list[Planned], scaler: Scaler) -> Cluster:
    cluster = Cluster(plan, load, scaler)
    cluster.run()
    return cluster


def assert_same_results(
    plan: ClusterPlan, load: list[Planned], scalers: tuple[Scaler, Scaler]
) -> None:
    """Simulate with and without fast-forward; all results must be exactly equal."""
    fast, stepwise = (
        simulated(replace(plan, single_steps=single), load, scaler)
        for single, scaler in zip((False, True), scalers, strict=True)
    )
    assert fast.calls == stepwise.calls
    assert fast.samples == stepwise.samples
    assert fast.num_steps == stepwise.num_steps
    assert (fast.worker_seconds, fast.busy_seconds) == (
        stepwise.worker_seconds,
        stepwise.busy_seconds,
    )
    assert figures(fast, plan) == figures(stepwise, plan)
    assert fast.clock.num_events < 0.5 * stepwise.clock.num_events


def test_jittered_steps_have_the_same_times_in_a_fast_forward() -> None:
    plan = ClusterPlan({"mixed": 2}, LIMITS, Timing(jitter=0.2), seed=3)
    assert_same_results(plan, load_of(20.0, 1.0), (Static(plan.pools), Static(plan.pools)))


def test_seed_determines_the_jitter_and_the_mean_stays() -> None:
    load = load_of(20.0, 1.0)
    jittered = ClusterPlan({"mixed": 2}, LIMITS, Timing(jitter=0.2), seed=3)
    plans = [jittered, jittered, replace(jittered, seed=4), replace(jittered, timing=Timing())]
    runs = [simulated(plan, load, Static(plan.pools)) for plan in plans]
    first, again, other = ([call.last for call in run.calls] for run in runs[:3])
    assert first == again
    assert first != other
    means = [run.busy_seconds / run.num_steps for run in (runs[0], runs[3])]
    # The standard error of the mean of n factors is 0.2 / sqrt(n).
    # The batches differ slightly: with other step times, other requests run at the same time.
    assert runs[0].num_steps > 400
    assert means[0] == pytest.approx(means[1], rel=5 * 0.2 / 400**0.5)


@pytest.mark.long
@pytest.mark.parametrize("pools", [{"mixed": 2}, {"prefill": 1, "decode": 2}])
def test_same_results_with_and_without_disaggregation(pools: dict[str, int]) -> None:
    plan = ClusterPlan(pools, LIMITS, Timing())
    assert_same_results(plan, load_of(20.0, 2.0), (Static(pools), Static(pools)))


@pytest.mark.long
def test_same_results_with_few_blocks_and_shared_prefixes() -> None:
    """Sequences wait, are preempted and share cached blocks."""
    shared = [
        Planned(number, 0.4 * number, 1000 + 7 * number, 800, (1, 2 + number % 3))
        for number in range(24)
    ]
    plan = ClusterPlan({"mixed": 1}, replace(LIMITS, num_blocks=80), Timing())
    static = Static({"mixed": 1})
    assert_same_results(plan, shared, (static, static))
    worker = simulated(plan, shared, static)._live["mixed-1"]
    assert worker.batcher.load().preemptions > 0
    assert worker.batcher.load().prompt_tokens_cached > 0


@pytest.mark.long
def test_same_results_while_the_pool_scales() -> None:
    plan = ClusterPlan({"mixed": 1}, LIMITS, Timing(), cold_start=10.0)
    limits = {"mixed": PoolLimits(least=1, most=6, gpus=1)}
    load = load_of(120.0, 8.0)
    assert_same_results(plan, load, (PenstockScaler(limits), PenstockScaler(limits)))


@pytest.mark.long
def test_same_results_in_slo_order() -> None:
    """The load is four times the capacity and blocks are few, so waiting prompts are reordered."""
    limits = replace(LIMITS, num_blocks=120, max_sequences=4)
    plan = ClusterPlan({"mixed": 2}, limits, Timing(), ttft_slo_seconds=0.5)
    assert_same_results(plan, load_of(20.0, 6.0), (Static(plan.pools), Static(plan.pools)))


@pytest.mark.long
def test_same_results_with_64_workers() -> None:
    plan = ClusterPlan({"mixed": 64}, LIMITS, Timing())
    load = replicated(load_of(20.0, 8.0), 3.0, seed=2)
    assert_same_results(plan, load, (Static(plan.pools), Static(plan.pools)))


# ------------------------------------------------------------------ faults


def run_fault_schedules(seeds: range) -> tuple[list[str], Counter[str]]:
    """Run schedules with fast-forward; return the failures, and counts of faults and tokens."""
    failed, counts = [], Counter[str]()
    for seed in seeds:
        world = ScheduleRun(schedule_of(seed), fast_forwards=True)
        try:
            played = world.play()
        except InvariantViolated as broken:
            failed.append(f"{seed}: {broken}")
            continue
        counts.update(played.faults)
        counts["tokens"] += played.tokens
    return failed, counts


def test_a_few_fault_schedules_pass() -> None:
    failed, _ = run_fault_schedules(range(5))
    assert not failed


@pytest.mark.long
def test_fault_schedules_pass() -> None:
    failed, counts = run_fault_schedules(range(200))
    assert not failed
    assert (
        min(counts["kill"], counts["hang"], counts["slow"], counts["drain"], counts["cut stream"])
        > 0
    )


def test_workers_that_share_cores_have_the_same_times_in_a_fast_forward() -> None:
    plan = ClusterPlan({"mixed": 2}, LIMITS, Timing(sharing=0.8), is_one_machine=True)
    load = load_of(40, 1.0)
    assert_same_results(plan, load, (Static(plan.pools), Static(plan.pools)))


def test_workers_that_share_cores_slow_each_other_down_while_both_compute() -> None:
    """Two equal requests run on two workers that share cores. A lone request has all the cores."""
    timing = Timing(sharing=0.5)
    together = [Planned(0, 1.0, 512, 100), Planned(1, 1.0, 512, 100)]
    plan = ClusterPlan({"mixed": 2}, LIMITS, timing, is_one_machine=True)
    apart = replace(plan, is_one_machine=False)

    def seconds(plan: ClusterPlan, load: list[Planned]) -> list[float]:
        return [call.tpot for call in simulated(plan, load, Static(plan.pools)).calls]

    base = seconds(apart, together)
    assert seconds(plan, together) == pytest.approx([1.5 * each for each in base], rel=0.02)
    assert seconds(plan, together[:1]) == pytest.approx(base[:1], rel=1e-6)


@pytest.mark.parametrize("tpot_slo", [0.0, 60.0])
def test_first_burst_of_workers_that_share_cores_is_divided(tpot_slo: float) -> None:
    pools, router = {"prefill": 1, "decode": 1}, RouterLimits(tpot_slo_seconds=tpot_slo)
    timing = Timing(sharing=0.8)
    plan = ClusterPlan(pools, LIMITS, timing, router=router, is_one_machine=True)
    burst = [Planned(number, 1.0, 512, 100) for number in range(16)]
    dispatcher = simulated(plan, burst, Static(pools)).router.dispatcher
    computed = {each.load.prompt_tokens_computed for each in dispatcher.workers()}
    assert computed == {512 * 8}
    assert dispatcher.counters.num_transfers == 0


def test_step_is_slowed_down_by_the_others_that_compute_when_it_begins() -> None:
    cores, runners = SharedCores(0.5), [_Runner(), _Runner(), _Runner()]
    for number, runner in enumerate(runners):
        cores.set_computing(runner, True)
        cores.set_computing(runner, True)  # the worker begins its next step without becoming idle
        assert cores.slowdown(runner) == 1 + 0.5 * number
    assert [runner.num_changes for runner in runners] == [2, 1, 0]
    cores.set_computing(runners[0], False)
    cores.set_computing(runners[0], False)
    assert [runner.num_changes for runner in runners] == [2, 2, 1]
    assert cores.slowdown(runners[1]) == 1.5


class _Runner:
    num_changes = 0

    def catch_up(self) -> None:
        self.num_changes += 1
