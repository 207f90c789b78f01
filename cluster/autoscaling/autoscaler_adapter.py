"""Connects the autoscaler to a cluster: builds its limits and inputs, and reports its status.

This module does no I/O and reads no clock. The supervisor provides the workers and their phases.
The routers provide their queues and the last reported load of each worker.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf

from penstock.cluster.autoscaling.autoscaler import (
    TTFT_SLO_POLICY,
    TTFT_SLO_UTILIZATION,
    TTFT_SLO_WAIT_SECONDS,
    Autoscaler,
    Decision,
    PoolInputs,
    PoolLimits,
    ScalingPolicy,
    ServingWorker,
)
from penstock.cluster.autoscaling.cold_start import ColdStartTimes
from penstock.cluster.autoscaling.pool_changes import Phase
from penstock.cluster.placement.placement_plan import Node, PlacementError, WorkerPlacement
from penstock.cluster.spec.spec import ROLES, ClusterSpec
from penstock.router.observability import snapshot

MAX_NOTES = 10
"""Number of recent scaling decisions that the cluster status shows."""

Phases = Mapping[str, Mapping[str, Phase]]
"""Phase of each worker, by pool name and worker name. Workers are in the order of their numbers."""


def pool_limits(spec: ClusterSpec, placements: Sequence[WorkerPlacement]) -> dict[str, PoolLimits]:
    """Return, by pool name, the size limits of each pool that has a worker in `placements`."""
    gpus = {each.role: _gpus_of(each) for each in placements}
    pools = {role: getattr(spec.pools, role) for role in ROLES if role in gpus}
    limits = {role: PoolLimits(pool.least, pool.most, gpus[role]) for role, pool in pools.items()}
    if not spec.engine.ttft_slo_seconds:
        return limits
    return {
        role: replace(one, wait_seconds=TTFT_SLO_WAIT_SECONDS, busy=TTFT_SLO_UTILIZATION)
        for role, one in limits.items()
    }


def scaling_policy(spec: ClusterSpec) -> ScalingPolicy:
    """Return the scaling policy for a cluster, given its TTFT SLO and `scale_down_seconds`."""
    pace = TTFT_SLO_POLICY if spec.engine.ttft_slo_seconds else ScalingPolicy()
    down = spec.scaling.scale_down_seconds
    return pace if down is None else replace(pace, down=down, down_step=min(pace.down_step, down))


def gpu_budget(
    spec: ClusterSpec, placements: Sequence[WorkerPlacement], nodes: Sequence[Node]
) -> int | None:
    """Return the maximum number of GPUs of all pools together, or None for no limit.

    The default of `scaling.max_gpus` is the number of GPUs of `nodes`. With `pool_nodes`, the
    default is no limit, because nodes may be added.

    Raises:
        PlacementError: the initial workers need more GPUs than `scaling.max_gpus`.
    """
    budget = spec.scaling.max_gpus
    if budget is None:
        return None if spec.pool_nodes else sum(node.gpus for node in nodes)
    first = [each for each in placements if each.index < getattr(spec.pools, each.role).replicas]
    required = sum(map(_gpus_of, first))
    if required > budget:
        raise PlacementError(
            f"scaling.max_gpus: {budget} is less than the {required} GPUs of the initial workers: "
            "reduce replicas or raise max_gpus"
        )
    return budget


def _gpus_of(placement: WorkerPlacement) -> int:
    """Return the number of GPUs that all ranks of a worker use together."""
    return int(sum(bundle.get("GPU", 0.0) for bundle in placement.bundles))


class AutoscalerInputs:
    """Builds the inputs of the autoscaler from the states that routers report."""

    def __init__(self) -> None:
        self._counted = 0  # value of `ClusterState.prompt_tokens` at the last call of `pools`
        self._uncached = 0.0  # estimated total of uncached prompt tokens that have arrived
        self._cold_starts = ColdStartTimes()

    def pools(
        self, state: snapshot.ClusterState, phases: Phases, now: float
    ) -> dict[str, PoolInputs]:
        """Return the state of each pool. `now` is in seconds on a monotonic clock."""
        numbers = {each.worker: each.numbers for each in state.workers}
        queues = {each.pool: each for each in state.pools}
        self._count_arrivals(state)
        self._cold_starts.observe(phases, now)
        return {
            pool: PoolInputs(
                workers=[
                    _serving(name, numbers.get(name), pool, now)
                    for name, phase in of.items()
                    if phase is Phase.SERVING
                ],
                pending=_count(of.values(), Phase.PENDING),
                draining=_count(of.values(), Phase.DRAINING),
                reassigned=_count(of.values(), Phase.REASSIGNED),
                waiting=queues[pool].queued if pool in queues else state.waiting,
                waiting_tokens=queues[pool].queued_tokens if pool in queues else 0,
                arrived_tokens=int(self._uncached) if _takes_prompts(pool, phases) else 0,
                cold_start=self._cold_starts.median_seconds(pool),
            )
            for pool, of in phases.items()
        }

    def _count_arrivals(self, state: snapshot.ClusterState) -> None:
        """Add the number of new prompt tokens, without those that were probably cached.

        The new tokens are assumed to have the same prefix cache hit rate as all prompt tokens
        that workers have reported so far.
        """
        new = state.prompt_tokens - self._counted
        self._counted = state.prompt_tokens
        reported = [each.numbers for each in state.workers if each.numbers is not None]
        taken = sum(each.prompt_tokens for each in reported)
        hits = sum(each.load.prompt_tokens_cached for each in reported) / taken if taken else 0.0
        # The difference `new` is negative after a router restart.
        self._uncached += max(new, 0) * (1 - hits)


class AutoscalerAdapter:
    """Keeps the desired sizes of the pools and the last scaling decisions.

    Raises:
        PlacementError: the initial workers need more GPUs than `scaling.max_gpus`.
    """

    def __init__(
        self, spec: ClusterSpec, placements: Sequence[WorkerPlacement], nodes: Sequence[Node]
    ) -> None:
        self._limits = pool_limits(spec, placements)
        self._scaler = Autoscaler(
            self._limits, gpu_budget(spec, placements, nodes), scaling_policy(spec)
        )
        self._inputs = AutoscalerInputs()
        self._desired = {role: getattr(spec.pools, role).replicas for role in self._limits}
        self._notes: deque[snapshot.ScalingDecision] = deque(maxlen=MAX_NOTES)

    @property
    def desired(self) -> Mapping[str, int]:
        """Desired number of workers of each pool."""
        return self._desired

    def decide(
        self, state: snapshot.ClusterState, phases: Phases, now: float
    ) -> Sequence[Decision]:
        """Return a decision for every pool. `now` is in seconds on a monotonic clock."""
        return self._scaler.decide(self._inputs.pools(state, phases, now), now)

    def record(
        self, decisions: Sequence[Decision], at: float
    ) -> Sequence[snapshot.ScalingDecision]:
        """Store the desired sizes of `decisions` and return the decisions that change a size.

        Args:
            at: time of the decisions, in seconds since 1970.
        """
        news = [
            snapshot.ScalingDecision(at, each.pool, str(each))
            for each in decisions
            if each.desired != self._desired[each.pool]
        ]
        self._desired = self._desired | {each.pool: each.desired for each in decisions}
        self._notes.extend(news)
        return news

    def scaling(self, decisions: Sequence[Decision], phases: Phases) -> snapshot.Scaling:
        """Return the scaling status. Call `record` with the same `decisions` first."""
        return scaling_status(decisions, self._limits, phases, tuple(self._notes))


def reassigned_workers(
    state: snapshot.ClusterState, placements: Sequence[WorkerPlacement]
) -> frozenset[str]:
    """Return the names of the workers whose role differs from their pool's.

    Only operators change roles.
    """
    own = {each.name: each.role for each in placements}
    given = {name: each.role for name, each in state.roles.items() if name in own}
    return frozenset(name for name, role in given.items() if role != own[name])


def worker_load(state: snapshot.ClusterState) -> dict[str, float]:
    """Return the number of running and queued sequences of each worker, by worker name."""
    return {
        each.worker: float(each.numbers.load.running + each.numbers.load.queued)
        for each in state.workers
        if each.numbers is not None
    }


def scaling_status(
    decisions: Sequence[Decision],
    limits: Mapping[str, PoolLimits],
    phases: Phases,
    notes: Sequence[snapshot.ScalingDecision],
) -> snapshot.Scaling:
    """Return the scaling status of all pools, as the cluster status shows it."""

    def lent(pool: str) -> int:
        return _count(phases[pool].values(), Phase.REASSIGNED)

    pools = [
        snapshot.PoolScaling(
            pool=each.pool,
            least=limits[each.pool].least,
            most=limits[each.pool].most,
            desired=min(each.desired, len(phases[each.pool]) - lent(each.pool)),
            pending=_count(phases[each.pool].values(), Phase.PENDING),
            draining=_count(phases[each.pool].values(), Phase.DRAINING),
            reason=each.reason,
            held_by=each.blocked_by,
            given_up=_count(phases[each.pool].values(), Phase.FAILED),
            terms={"queue": each.queue_term, "occupancy": each.occupancy_term},
        )
        for each in decisions
    ]
    return snapshot.Scaling(pools, notes)


def _serving(
    name: str, numbers: snapshot.WorkerStats | None, pool: str, now: float
) -> ServingWorker:
    if numbers is None:
        return ServingWorker(name, reported_at=-inf)
    load = numbers.load
    # A decode worker will need a slot for each queued sequence, so count these too.
    sequences = load.running + (load.queued if pool == "decode" else 0)
    return ServingWorker(name, now, load, sequences, max(numbers.max_sequences, 1))


def _count(phases: Collection[Phase], *counted: Phase) -> int:
    return sum(each in counted for each in phases)


def _takes_prompts(pool: str, phases: Phases) -> bool:
    """Return True if arriving prompt tokens count as load of `pool`.

    They count as load of the prefill pool, or of the mixed pool if there is no prefill pool.
    """
    return pool == "prefill" or (pool == "mixed" and "prefill" not in phases)
