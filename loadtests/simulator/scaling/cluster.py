"""Simulates a cluster under load: scaled pools, their cost, and the latencies that clients see.

The cluster has one router. A worker costs GPU time from the scaler's request for it until it stops.
A new worker serves only after its cold start, and a surplus worker is drained before it stops.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.cluster.autoscaling.autoscaler import PoolInputs, ServingWorker
from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.simulator.model.timed_model import TimedModel
from penstock.loadtests.simulator.model.timing import Timing
from penstock.loadtests.simulator.scaling.call import Call, RecordingClient
from penstock.loadtests.simulator.scaling.scalers import (
    INTERVAL_SECONDS,
    PoolView,
    Scaler,
    Static,
)
from penstock.loadtests.simulator.scaling.workloads import prompt_of
from penstock.loadtests.simulator.world.clock import Clock, rare_collections
from penstock.loadtests.simulator.world.network import Network
from penstock.loadtests.simulator.world.rank_pairs import TransferTiming
from penstock.loadtests.simulator.world.router import Router
from penstock.loadtests.simulator.world.session import WorkerShape
from penstock.loadtests.simulator.world.shared_cores import SharedCores
from penstock.loadtests.simulator.world.worker import HEARTBEAT_SECONDS, Worker, report_load
from penstock.router.routing import events as ev
from penstock.router.routing.dispatcher import DispatcherLimits as RouterLimits
from penstock.router.routing.placement.policy import Policy
from penstock.router.routing.placement.routing_strategies import DEFAULT_STRATEGY, policy_of
from penstock.router.routing.worker_registry import LivenessBounds
from penstock.workers.kv_transfer.protocol.messages import WorkerId
from penstock.workers.scheduling.config import SchedulerConfig

LATENCY_SECONDS = 0.0003
HASH_KEY = b"key of the block hashes"
BANDWIDTH = 40e9
"""Bytes per second between two workers."""

TRANSFER_SECONDS = 0.001
"""Fixed seconds of each KV transfer, unless the time model sets them."""

MANY_WORKERS = 1000
MANY_SAMPLES_SECONDS = 60.0
"""Time between two samples if there are at least MANY_WORKERS workers and their number is fixed. A
sample ends the fast-forward of every worker."""

END_SECONDS = 3600.0
"""Seconds after the last arrival until all requests must have ended."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Settings of the simulated cluster. Times are in seconds."""

    pools: Mapping[str, int]  # initial number of workers of each role
    limits: SchedulerConfig  # limits that each worker has
    timing: Timing
    cold_start: float = 30.0  # seconds
    bandwidth: float = BANDWIDTH
    ttft_slo_seconds: float = 0.0  # SLO of the router's queue order; 0 means order of arrival
    router: RouterLimits | None = None  # None: an unbounded queue with `ttft_slo_seconds`
    single_steps: bool = False  # whether every step is a separate event
    # Whether workers report step times to the routers. This changes the results slightly, compared
    # with `single_steps`: steps that are simulated as one event report only their mean time.
    reports_step_seconds: bool = False
    # Whether all workers share the cores of one machine (see `Timing.sharing`).
    is_one_machine: bool = False
    routing: str = DEFAULT_STRATEGY  # name of the placement strategy
    seed: int = 0  # seed of the random variation of step times


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of all pools at one time."""

    at: float
    serving: int
    pending: int
    draining: int
    queued: int  # number of queued requests, in the router and in the workers
    running: int
    kv_usage: float


@dataclass(slots=True)
class _Pool:
    serving: list[Worker] = field(default_factory=list)
    draining: list[Worker] = field(default_factory=list)
    pending: int = 0
    busy_before: float = 0.0

    @property
    def count(self) -> int:
        return len(self.serving) + self.pending


class Cluster:
    """A simulated cluster.

    `calls`, `samples` and `worker_seconds` contain the results after `run` has returned. `policy`
    places requests; None means the strategy of the plan. `tenants` contains the tenant of each
    request of the load; if it is empty, all requests have the same tenant.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        load: Sequence[Planned],
        scaler: Scaler,
        policy: Policy | None = None,
        tenants: Sequence[str] = (),
    ) -> None:
        self.clock = Clock()
        self.calls = [Call(planned) for planned in load]
        self.samples: list[Sample] = []
        self.worker_seconds = 0.0
        self.busy_seconds = 0.0
        self.num_steps = 0
        self.num_scalings = 0
        self._scaler = scaler
        bandwidth = plan.timing.bandwidth or plan.bandwidth
        self._network = Network(self.clock, LATENCY_SECONDS, bandwidth)
        self._router_free_at = 0.0
        many = isinstance(scaler, Static) and sum(plan.pools.values()) >= MANY_WORKERS
        self._interval = MANY_SAMPLES_SECONDS if many else INTERVAL_SECONDS
        self._by_name: dict[WorkerId, Worker] = {}
        self._live: dict[str, Worker] = {}
        self._num_started = 0
        self._left = len(load)
        self._arrived_tokens = 0
        self._decided_at = 0.0
        self._costs_since = 0.0
        self._tenants = tenants or [""] * len(load)
        limits = plan.router or _unbounded(plan)
        # Heartbeats would be most of the events. No process fails, so liveness is not checked.
        limits = replace(limits, bounds=LivenessBounds(math.inf, math.inf, stuck_after=math.inf))
        self._plan = replace(plan, limits=_fitting(plan.limits, load))
        self._clients: dict[int, RecordingClient] = {}
        self.router = Router(
            "router",
            self._network,
            policy_of(plan.routing) if policy is None else policy,
            limits,
            self._live.get,
            heartbeats=False,
            run_clients=self._clients,
            hash_key=self._plan.limits.hash_key,
        )
        self._cores = SharedCores(plan.timing.sharing) if plan.is_one_machine else None
        self._pools = {name: _Pool() for name in plan.pools}
        for name, count in plan.pools.items():
            for _ in range(count):
                self._serve(name)

    def run(self) -> None:
        """Run until every call has ended. Raises RuntimeError if some calls never end."""
        last = self.calls[-1].planned.due if self.calls else 0.0
        self._arrive(0)
        self.clock.after(self._interval, self._decide_sizes)
        self.clock.after(HEARTBEAT_SECONDS, self._report_loads)
        with rare_collections():
            while self._left:
                if self.clock.now > last + END_SECONDS:
                    limit = f"{END_SECONDS:g} s (simulated) after the last arrival"
                    raise RuntimeError(f"{self._left} requests have not ended {limit}: add workers")
                self.clock.step()
        self._accrue_cost()
        for worker in self._live.values():
            self._count(worker)

    # ------------------------------------------------------------ calls

    def _arrive(self, number: int) -> None:
        """Schedule one call's arrival.

        The arrival then schedules the arrival of the next call, so that the heap stays small.
        """
        if number < len(self.calls):
            self.clock.at(self.calls[number].planned.due, lambda: self._receive(number))

    def _receive(self, number: int) -> None:
        """Submit a call after the time that it spends outside of the engine."""
        timing, planned = self._plan.timing, self.calls[number].planned
        self._router_free_at = max(self._router_free_at, self.clock.now) + timing.router
        delay = timing.request + timing.request_token * planned.input_len
        if (due := self._router_free_at + delay) > self.clock.now:
            self.clock.at(due, lambda: self._submit(number))
        else:
            self._submit(number)
        self._arrive(number + 1)

    def _submit(self, number: int) -> None:
        call = self.calls[number]
        planned = call.planned
        self._arrived_tokens += planned.input_len
        request = ev.Request(
            id=number + 1,
            prompt=prompt_of(planned),
            params=SamplingParams(max_tokens=planned.output_len),
            max_tokens=planned.output_len,
            tenant=self._tenants[number],
        )
        client = RecordingClient(call, self.clock, lambda: self._ended(number + 1))
        self._clients[number + 1] = client
        self.router.submit(request, client)

    def _ended(self, request: int) -> None:
        self._left -= 1
        del self._clients[request]

    # ------------------------------------------------------------ workers

    def _serve(self, pool: str) -> None:
        """Create a worker that serves at once."""
        self._num_started += 1
        name, limits, timing = f"{pool}-{self._num_started}", self._plan.limits, self._plan.timing
        info = _info_of(name, pool, limits, "" if self._cores is None else "machine")
        transfers = TransferTiming(setup=timing.transfer or TRANSFER_SECONDS, write=0.0)
        shape = WorkerShape(info, limits, int(timing.kv_bytes * limits.block_size), transfers)
        leaps = not self._plan.single_steps
        worker = Worker(
            shape,
            TimedModel(timing, self._plan.seed, name),
            self._network,
            self._by_name.get,
            fast_forwards=leaps,
            heartbeats=False,
        )
        worker.reports_step_seconds = self._plan.reports_step_seconds
        worker.steps.cores = self._cores
        self._by_name[name, "1"] = self._live[name] = worker
        self._pools[pool].serving.append(worker)
        self.router.link(name)

    def _add_worker(self, pool: str) -> None:
        """Replace a pending worker by a serving one at the end of its cold start."""
        self._accrue_cost()
        state = self._pools[pool]
        state.pending -= 1
        self._serve(pool)

    def _scale_to(self, pool: str, wanted: int) -> None:
        """Scale a pool to `wanted` workers.

        New workers are requested, or serving ones are drained.
        """
        self._accrue_cost()
        state = self._pools[pool]
        self.num_scalings += wanted != state.count
        while state.count < wanted:
            state.pending += 1
            self.clock.after(self._plan.cold_start, lambda: self._add_worker(pool))
        while state.count > max(wanted, 1) and len(state.serving) > 1:
            self._drain(state)

    def _drain(self, state: _Pool) -> None:
        """Drain the worker with the fewest sequences among the serving workers of a pool."""
        worker = min(state.serving, key=lambda one: one.load.running + one.load.queued)
        state.serving.remove(worker)
        state.draining.append(worker)
        worker.drain()
        self.clock.after(1.0, lambda: self._remove_when_idle(worker, state))

    def _remove_when_idle(self, worker: Worker, state: _Pool) -> None:
        """Remove a draining worker when it has no sequences. This is checked every second."""
        if not worker.idle:
            self.clock.after(1.0, lambda: self._remove_when_idle(worker, state))
            return
        self._accrue_cost()
        name = worker.info.worker
        state.draining.remove(worker)
        self._count(worker)
        self.router.unlink(name)
        del self._live[name], self._by_name[name, "1"]
        worker.process.kill()

    def _count(self, worker: Worker) -> None:
        """Add the totals of a worker to those of the cluster."""
        self.busy_seconds += worker.steps.busy_seconds
        self.num_steps += worker.steps.num_steps

    def _accrue_cost(self) -> None:
        """Add the cost of all workers since this function was last called."""
        now = self.clock.now
        num = sum(pool.count + len(pool.draining) for pool in self._pools.values())
        self.worker_seconds += num * (now - self._costs_since)
        self._costs_since = now

    # ------------------------------------------------------------ measuring and scaling

    def _decide_sizes(self) -> None:
        now = self.clock.now
        for worker in self._live.values():
            worker.steps.catch_up()
        sights = {name: self._pool_view(name, now) for name in self._pools}
        self._decided_at = now
        self._sample(now)
        for pool, wanted in self._scaler.decide(sights, now).items():
            if wanted != self._pools[pool].count:
                self._scale_to(pool, wanted)
        self.clock.after(self._interval, self._decide_sizes)

    def _report_loads(self) -> None:
        for worker in self._live.values():
            report_load(worker)
        self.clock.after(HEARTBEAT_SECONDS, self._report_loads)

    def _pool_view(self, name: str, now: float) -> PoolView:
        pool, dispatcher = self._pools[name], self.router.dispatcher
        # Queued requests count for the same pool as in `router/observability/snapshot`.
        first = "prefill" if "prefill" in self._pools else "mixed"
        waits = name in (set(dispatcher.short_of) & self._pools.keys() or {first})
        state = PoolInputs(
            workers=[_serving(worker, now) for worker in pool.serving],
            pending=pool.pending,
            draining=len(pool.draining),
            waiting=dispatcher.num_queued if waits else 0,
            waiting_tokens=dispatcher.num_queued_tokens if waits and name == first else 0,
            arrived_tokens=self._arrived_tokens if name == first else 0,
            cold_start=self._plan.cold_start,
        )
        busy = sum(worker.steps.busy_seconds for worker in pool.serving)
        seconds = (now - self._decided_at) * max(len(pool.serving), 1)
        busy_fraction = max(busy - pool.busy_before, 0.0) / seconds if seconds else 0.0
        pool.busy_before = busy
        return PoolView(state, min(busy_fraction, 1.0))

    def _sample(self, now: float) -> None:
        pools = self._pools.values()
        workers = [worker for pool in pools for worker in pool.serving]
        loads = [worker.batcher.load() for worker in workers]
        blocks = self._plan.limits.num_blocks
        used = sum(load.held_blocks for load in loads)
        self.samples.append(
            Sample(
                now,
                len(workers),
                sum(pool.pending for pool in pools),
                sum(len(pool.draining) for pool in pools),
                self.router.dispatcher.num_queued + sum(load.queued for load in loads),
                sum(load.running for load in loads),
                used / (blocks * max(len(workers), 1)),
            )
        )


def _info_of(name: str, pool: str, limits: SchedulerConfig, machine: str) -> ev.WorkerInfo:
    return ev.WorkerInfo(
        name,
        "1",
        pool,
        "same",
        limits.block_size,
        limits.num_blocks,
        limits.max_model_len,
        limits.max_sequences,
        machine=machine,
    )


def _unbounded(plan: ClusterPlan) -> RouterLimits:
    """Return the limits of a router with an unbounded queue and the SLOs of the plan."""
    return RouterLimits(
        10**6,
        10**12,
        10**12,
        ttft_slo_seconds=plan.ttft_slo_seconds,
        tpot_slo_seconds=plan.limits.tpot_slo_seconds,
    )


def _fitting(limits: SchedulerConfig, load: Sequence[Planned]) -> SchedulerConfig:
    """Limit `max_model_len` to the longest sequence, to save memory with thousands of workers.

    Blocks are hashed only if prompts share blocks, because otherwise no block is ever reused.
    """
    longest = max((one.input_len + one.output_len for one in load), default=1)
    hash_key = HASH_KEY if any(planned.blocks for planned in load) else b""
    longest = min(limits.max_model_len, longest + 1)
    return replace(limits, max_model_len=longest, hash_key=hash_key)


def _serving(worker: Worker, now: float) -> ServingWorker:
    load = worker.batcher.load()._replace(prompt_seconds=worker.steps.prompt_seconds)
    max_sequences = worker.batcher.limits.max_sequences
    return ServingWorker(worker.info.worker, now, load, load.running, max_sequences)
