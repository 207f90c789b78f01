"""Simulates a cluster under load: scaled pools, their cost, and the latencies that clients see.

The cluster has one router. A worker costs GPU time from its request until it has stopped: a new
worker serves only after its cold start, and a surplus worker is drained before it stops.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.cluster.autoscaling.autoscaler import PoolInputs, ServingWorker
from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.simulator.model.timing import TimedModel, Timing
from penstock.loadtests.simulator.scaling.scalers import INTERVAL_SECONDS, PoolView, Scaler
from penstock.loadtests.simulator.scaling.workloads import prompt_of
from penstock.loadtests.simulator.world.clock import Clock, rare_collections
from penstock.loadtests.simulator.world.network import Network
from penstock.loadtests.simulator.world.router import Router
from penstock.loadtests.simulator.world.session import WorkerShape
from penstock.loadtests.simulator.world.transfer_endpoints import WorkerId
from penstock.loadtests.simulator.world.worker import Worker
from penstock.router.routing import events as ev
from penstock.router.routing.dispatcher import DispatcherLimits as RouterLimits
from penstock.router.routing.placement.policy import LeastLoaded, Policy
from penstock.workers.scheduling.config import SchedulerConfig

LATENCY_SECONDS = 0.0003
BANDWIDTH = 40e9
"""Bytes per second between two workers."""

END_SECONDS = 3600.0
"""Seconds after the last arrival until all requests must have ended."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Settings of the simulated cluster."""

    pools: Mapping[str, int]  # initial number of workers, by role
    limits: SchedulerConfig  # equal for all workers
    timing: Timing
    cold_start: float = 30.0  # seconds
    bandwidth: float = BANDWIDTH
    ttft_slo_seconds: float = 0.0  # SLO of the router's queue order; 0: ordered by arrival
    single_steps: bool = False  # True: every step is an event of its own, without fast-forward


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of all pools at one time."""

    at: float
    serving: int
    pending: int
    draining: int
    queued: int  # number of requests queued in the router and in the workers
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


@dataclass(slots=True)
class Call:
    """One request as seen by its client; times are seconds of virtual time."""

    planned: Planned
    first: float = float("nan")  # time of the first token
    last: float = float("nan")
    num_tokens: int = 0
    status: str = ""  # final status; "" while the request is running

    @property
    def ttft(self) -> float:
        return self.first - self.planned.due

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for an answer of one token."""
        return (self.last - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


class _RecordingClient:
    """A client that records the times of one call."""

    def __init__(self, call: Call, clock: Clock, ended: Callable[[], None]) -> None:
        self._call = call
        self._clock = clock
        self._ended = ended

    def deliver(self, deliver: ev.Deliver) -> None:
        call, now = self._call, self._clock.now
        if not call.num_tokens:
            call.first = now
        call.last = now
        call.num_tokens += len(deliver.tokens)

    def on_choice_stopped(self, choice: int) -> None:
        """Do nothing, because this client never cuts an answer."""

    def end(self, end: ev.EndRequest) -> None:
        self._call.status = end.status.value
        self._ended()


class Cluster:
    """A simulated cluster: call `run`, then read `calls`, `samples` and `worker_seconds`."""

    def __init__(
        self,
        plan: ClusterPlan,
        load: Sequence[Planned],
        scaler: Scaler,
        policy: Policy | None = None,
    ) -> None:
        self.clock = Clock()
        self.calls = [Call(planned) for planned in load]
        self.samples: list[Sample] = []
        self.worker_seconds = 0.0
        self.busy_seconds = 0.0
        self.num_steps = 0
        self.num_scalings = 0
        self._plan = replace(plan, limits=_fitting(plan.limits, load))
        self._scaler = scaler
        self._network = Network(self.clock, LATENCY_SECONDS, plan.bandwidth)
        self._by_name: dict[WorkerId, Worker] = {}
        self._live: dict[str, Worker] = {}
        self._num_started = 0
        self._left = len(load)
        self._arrived_tokens = 0
        self._decided_at = 0.0
        self._costs_since = 0.0
        limits = RouterLimits(10**6, 10**12, plan.ttft_slo_seconds)
        policy = LeastLoaded() if policy is None else policy
        self.router = Router("router", self._network, policy, limits, self._live.get)
        self._pools = {name: _Pool() for name in plan.pools}
        for name, count in plan.pools.items():
            for _ in range(count):
                self._serve(name)

    def run(self) -> None:
        """Run until every call has ended. Raises RuntimeError if some calls never end."""
        last = self.calls[-1].planned.due if self.calls else 0.0
        self._arrive(0)
        self.clock.after(INTERVAL_SECONDS, self._decide_sizes)
        with rare_collections():
            while self._left:
                if self.clock.now > last + END_SECONDS:
                    waits = f"{self._left} requests never end"
                    raise RuntimeError(f"{waits}: the cluster is too small")
                self.clock.step()
        self._accrue_cost()
        for worker in self._live.values():
            self._count(worker)

    # ------------------------------------------------------------ calls

    def _arrive(self, number: int) -> None:
        """Schedule the arrival of one call, which then schedules the next: the heap stays small."""
        if number < len(self.calls):
            self.clock.at(self.calls[number].planned.due, lambda: self._submit(number))

    def _submit(self, number: int) -> None:
        call = self.calls[number]
        planned = call.planned
        self._arrived_tokens += planned.input_len
        request = ev.Request(
            id=number + 1,
            prompt=prompt_of(planned),
            params=SamplingParams(max_tokens=planned.output_len),
            max_tokens=planned.output_len,
        )
        self.router.submit(request, _RecordingClient(call, self.clock, self._ended))
        self._arrive(number + 1)

    def _ended(self) -> None:
        self._left -= 1

    # ------------------------------------------------------------ workers

    def _serve(self, pool: str) -> None:
        """Create a worker that serves at once."""
        self._num_started += 1
        name, limits, timing = f"{pool}-{self._num_started}", self._plan.limits, self._plan.timing
        info = ev.WorkerInfo(
            name,
            "1",
            pool,
            "same",
            limits.block_size,
            limits.num_blocks,
            limits.max_model_len,
            limits.max_sequences,
        )
        shape = WorkerShape(info, limits, int(timing.kv_bytes * limits.block_size))
        leaps = not self._plan.single_steps
        worker = Worker(
            shape, TimedModel(timing), self._network, self._by_name.get, fast_forwards=leaps
        )
        self._by_name[name, "1"] = self._live[name] = worker
        self._pools[pool].serving.append(worker)
        self.router.link(name)

    def _add_worker(self, pool: str) -> None:
        """Turn a pending worker into a serving worker, at the end of its cold start."""
        self._accrue_cost()
        state = self._pools[pool]
        state.pending -= 1
        self._serve(pool)

    def _scale_to(self, pool: str, wanted: int) -> None:
        """Scale a pool to `wanted` workers: request new workers or drain serving ones."""
        self._accrue_cost()
        state = self._pools[pool]
        self.num_scalings += wanted != state.count
        while state.count < wanted:
            state.pending += 1
            self.clock.after(self._plan.cold_start, lambda: self._add_worker(pool))
        while state.count > max(wanted, 1) and len(state.serving) > 1:
            self._drain(state)

    def _drain(self, state: _Pool) -> None:
        """Drain the worker with the fewest sequences of a pool."""
        worker = min(state.serving, key=lambda one: one.load.running + one.load.queued)
        state.serving.remove(worker)
        state.draining.append(worker)
        worker.drain()
        self.clock.after(1.0, lambda: self._measure_utilization(worker, state))

    def _measure_utilization(self, worker: Worker, state: _Pool) -> None:
        if not worker.idle:
            self.clock.after(1.0, lambda: self._measure_utilization(worker, state))
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
        self.clock.after(INTERVAL_SECONDS, self._decide_sizes)

    def _pool_view(self, name: str, now: float) -> PoolView:
        pool, dispatcher = self._pools[name], self.router.dispatcher
        # Queued requests count for the same pool as in `router/state` and `cluster/scaling`.
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


def _fitting(limits: SchedulerConfig, load: Sequence[Planned]) -> SchedulerConfig:
    """Limit `max_model_len` to the longest sequence, to save memory in thousands of workers."""
    longest = max((one.input_len + one.output_len for one in load), default=1)
    return replace(limits, max_model_len=min(limits.max_model_len, longest + 1))


def _serving(worker: Worker, now: float) -> ServingWorker:
    load = worker.batcher.load()._replace(prompt_seconds=worker.steps.prompt_seconds)
    max_sequences = worker.batcher.limits.max_sequences
    return ServingWorker(worker.info.worker, now, load, load.running, max_sequences)
