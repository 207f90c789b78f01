"""Snapshot of a router and its cluster as plain data, for metrics and status pages."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import penstock
from penstock.common.worker_load import WorkerLoad
from penstock.router.observability.request_metrics import RequestMetrics
from penstock.router.observability.role_registry import Assignment, Assignments
from penstock.router.routing.dispatcher import Dispatcher, WorkerStatus
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.request_state import Phase
from penstock.router.worker_links.worker_link import WorkerLink

DOWN = "down"
SILENT = (DOWN, "suspect")
"""Worker states without recent statistics."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Histogram of a worker's step times since its start."""

    bounds: Sequence[float]  # upper bounds of the buckets in seconds, ascending
    counts: Sequence[int]  # steps per bucket; a last entry counts the steps above all bounds
    seconds: float  # total duration of all steps, in seconds


# `WorkerStats` and `WorkerState` are not frozen, because creating an instance of a frozen class
# takes 3 times as long.
@dataclass(slots=True)
class WorkerStats:
    """A worker's last reported load, and the sizes that are needed to interpret the load."""

    load: WorkerLoad
    max_sequences: int  # maximum number of running sequences
    block_size: int  # tokens per block
    # Bucket bounds of `WorkerLoad.step_counts` in seconds, ascending.
    step_bounds: Sequence[float] = ()
    num_blocks: int = 0  # number of blocks of the KV cache
    # Bucket bounds of `WorkerLoad.step_token_counts`, ascending.
    step_token_bounds: Sequence[float] = ()
    max_batched_tokens: int = 0  # maximum number of tokens of a step
    enough_prompt_tokens: int = 0  # see `SchedulerConfig` of workers

    @property
    def kv_waste(self) -> float:
        """Empty fraction of the token slots in used blocks."""
        slots = self.load.used_blocks * self.block_size
        return self.load.unwritten_slots / slots if slots else 0.0

    @property
    def blocks(self) -> Mapping[str, int]:
        """Number of KV blocks by state."""
        load = self.load
        return {
            "used": load.used_blocks,
            "leased": load.leased_blocks,
            "reserved": load.reserved_blocks,
            "cached": load.cached_blocks,
            "free": load.free_blocks,
        }

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        return self.load.num_blocks * self.block_size

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens since the worker's start, computed or from the prefix cache."""
        return self.load.prompt_tokens_computed + self.load.prompt_tokens_cached

    @property
    def steps(self) -> StepTimes:
        """The histogram of step times."""
        bounds, counts = self._buckets(self.step_bounds, self.load.step_counts)
        return StepTimes(bounds, counts, self.load.step_seconds)

    @property
    def step_tokens(self) -> tuple[Sequence[float], Sequence[int], int]:
        """The histogram of tokens per step.

        It consists of the bounds of the buckets, the number of steps in each bucket, and the number
        of tokens of all steps.
        """
        bounds, counts = self._buckets(self.step_token_bounds, self.load.step_token_counts)
        return bounds, counts, self.load.step_tokens

    def _buckets(
        self, bounds: Sequence[float], counts: Sequence[int]
    ) -> tuple[Sequence[float], Sequence[int]]:
        """Return the bounds of buckets and the number of steps in each bucket.

        If the two lengths do not match, all steps are in one bucket without bounds.
        """
        if len(counts) != len(bounds) + 1:  # an exception would hide the metrics of all workers
            return (), (self.load.num_steps,)
        return list(bounds), list(counts)


@dataclass(slots=True)
class WorkerState:
    """A worker of this router's configuration, which may be connected or not."""

    worker: str
    role: str  # prefill, decode or mixed; empty until the worker's first Welcome message
    state: str  # ready, suspect, stuck, draining or down
    requests: int  # this router's requests at the worker: running, queued, leased or incoming
    numbers: WorkerStats | None  # the last load report, or None if it is too old
    indexed_blocks: int = 0  # number of the worker's cached blocks in this router's prefix index

    @property
    def up(self) -> bool:
        """Whether messages of the worker arrive."""
        return self.state not in SILENT


@dataclass(frozen=True, slots=True)
class PoolState:
    """The workers of one role and their queue."""

    pool: str
    workers: int  # number of configured workers, connected or not
    ready: int
    running: int  # number of running sequences
    waiting: int  # requests queued at all routers and at the workers
    waiting_tokens: int  # prompt tokens of the waiting requests
    queued: int  # waiting requests that are queued at this router
    queued_tokens: int  # prompt tokens of the requests that are queued at this router


@dataclass(frozen=True, slots=True)
class PoolScaling:
    """Autoscaling state of a pool of workers."""

    pool: str
    least: int  # lower limit of the number of workers
    most: int  # upper limit of the number of workers
    desired: int  # target number of workers
    pending: int  # workers that are starting or restarting
    draining: int  # number of draining workers
    reason: str
    held_by: str  # limit that prevents a change, or empty if none does
    given_up: int = 0  # workers that failed to start and will be retried later
    # Number of workers that the pool's load requires, for each scaling term (queue, occupancy).
    terms: Mapping[str, float] = field(default_factory=dict)
    # For each starting or draining worker, the reason and duration of its wait.
    waits: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """A change of a pool's desired number of workers."""

    at: float  # time of the change, in seconds since 1970
    pool: str
    text: str  # the old number, the new number and the reason


@dataclass(frozen=True, slots=True)
class Scaling:
    """Autoscaling state of all pools, from the supervisor."""

    pools: Sequence[PoolScaling] = ()
    decisions: Sequence[ScalingDecision] = ()  # the most recent decisions, oldest first


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Expected time of a KV transfer, from recent transfers; 0 before the first transfer."""

    fixed_seconds: float = 0.0  # part of the time that does not depend on the transfer's size
    bytes_per_second: float = 0.0
    bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class RouterState:
    """One of the routers that share the workers: its addresses and its queue."""

    router: str
    state: str  # ready, waiting (for workers), draining or down
    http: str = ""  # host:port, or empty if unknown
    grpc: str = ""
    streams: int = 0  # requests that have not ended
    waiting: int = 0  # requests that are not assigned to a worker
    waiting_tokens: int = 0  # prompt tokens of requests that were never placed
    queued: Mapping[str, int] = field(default_factory=dict)  # number of waiting requests, by pool
    # Number of waiting prompt tokens, by pool.
    queued_tokens: Mapping[str, int] = field(default_factory=dict)
    node: str = ""  # IP address of the router's node, or empty if unknown


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The cluster as one router sees it. Totals are since the start of the router."""

    model: str
    version: str
    not_ready: str  # why the router is not ready, or empty if it is ready
    streams: int  # requests that have not ended
    waiting: int  # requests that are not assigned to a worker
    waiting_tokens: int  # prompt tokens of requests that were never placed
    pools: Sequence[PoolState]
    workers: Sequence[WorkerState]
    finished: Mapping[str, int]  # number of requests by finish reason
    generated: Mapping[str, int]  # number of generated tokens by tenant
    failovers: int
    kv_transfers: int
    kv_transfers_failed: int
    kv_transfer_bytes: int
    prompt_tokens: int  # prompt tokens of all accepted requests
    scaling: Scaling
    # Prompt tokens of accepted requests, by tenant name.
    prompt_tokens_by_tenant: Mapping[str, int] = field(default_factory=dict)
    # Roles that operators assigned, by worker.
    roles: Mapping[str, Assignment] = field(default_factory=dict)
    # Number of prompts by `PrefillDecision`.
    placed: Mapping[str, int] = field(default_factory=dict)
    kv_transfer_cost: TransferCost = TransferCost()
    # This router now, and the other routers as the supervisor last reported them.
    routers: Sequence[RouterState] = ()
    held_back: int = 0  # requests that are held back because their worker was lost


def snapshot_cluster(
    own: RouterState,
    model: str,
    not_ready: str,
    links: Sequence[WorkerLink],
    dispatcher: Dispatcher,
    metrics: RequestMetrics,
    scaling: Scaling,
    roles: Assignments,
    routers: Sequence[RouterState] = (),
) -> ClusterState:
    """Return the current state of the cluster as this router sees it.

    Args:
        own: name and state of this router.
        model: served name of the model.
        not_ready: why the router is not ready; empty if it is.
        links: links to all configured workers.
        dispatcher: source of queues and workers.
        metrics: totals of this router.
        scaling: autoscaling state, from the supervisor.
        roles: roles that operators assigned.
        routers: all routers, as last reported by the supervisor.
    """
    workers = snapshot_workers(links, dispatcher.workers(), roles)
    counters = dispatcher.counters
    others = [each for each in routers if each.router != own.router]
    pools = snapshot_pools(workers, dispatcher, [each.pool for each in scaling.pools], others)
    return ClusterState(
        model=model,
        version=penstock.__version__,
        not_ready=not_ready,
        streams=dispatcher.num_requests,
        waiting=dispatcher.num_queued,
        waiting_tokens=dispatcher.num_queued_tokens,
        pools=pools,
        workers=workers,
        finished=dict(metrics.finished),
        generated=metrics.generated_by_tenant(),
        failovers=counters.num_failovers,
        kv_transfers=counters.num_transfers,
        kv_transfers_failed=counters.num_transfers_failed,
        kv_transfer_bytes=metrics.kv_transfer_bytes,
        prompt_tokens=metrics.prompt_tokens,
        scaling=scaling,
        prompt_tokens_by_tenant=dict(metrics.prompt_tokens_by_tenant),
        roles=dict(roles),
        placed=dict(dispatcher.num_prefill_decisions),
        kv_transfer_cost=_transfer_cost(dispatcher.transfer_costs),
        routers=_routers(own, dispatcher, pools, routers),
        held_back=dispatcher.num_held_back,
    )


def _transfer_cost(costs: TransferCostModel) -> TransferCost:
    return TransferCost(costs.fixed_seconds, costs.bytes_per_second, costs.bytes_per_token)


def _routers(
    own: RouterState,
    dispatcher: Dispatcher,
    pools: Sequence[PoolState],
    routers: Sequence[RouterState],
) -> list[RouterState]:
    now = replace(
        own,
        streams=dispatcher.num_requests,
        waiting=dispatcher.num_queued,
        waiting_tokens=dispatcher.num_queued_tokens,
        queued={each.pool: each.queued for each in pools},
        queued_tokens={each.pool: each.queued_tokens for each in pools},
    )
    found = [
        replace(now, http=each.http, grpc=each.grpc) if each.router == own.router else each
        for each in routers
    ]
    return found or [now]


def snapshot_workers(
    links: Sequence[WorkerLink], statuses: Sequence[WorkerStatus], roles: Assignments
) -> list[WorkerState]:
    """Return all configured workers, sorted by name.

    Workers that are down or suspect have no `numbers`.
    """
    by_name = {status.worker: status for status in statuses}
    links = sorted(links, key=lambda link: link.worker)
    return [_worker(link, by_name.get(link.worker), roles.get(link.worker)) for link in links]


def _worker(link: WorkerLink, status: WorkerStatus | None, given: Assignment | None) -> WorkerState:
    state = DOWN if status is None else status.state
    numbers = None
    info = link.info
    if info is not None and link.load is not None and state not in SILENT:
        numbers = WorkerStats(
            link.load,
            info.max_sequences,
            info.block_size,
            info.step_bounds,
            info.num_blocks,
            info.step_token_bounds,
            info.max_batched_tokens,
            info.enough_prompt_tokens,
        )
    role = "" if info is None else info.role if given is None else given.role
    if status is None:
        return WorkerState(link.worker, role, state, 0, numbers)
    requests, indexed = status.num_requests, status.num_indexed_blocks
    return WorkerState(link.worker, role, state, requests, numbers, indexed)


def snapshot_pools(
    workers: Sequence[WorkerState],
    dispatcher: Dispatcher,
    names: Sequence[str],
    others: Sequence[RouterState] = (),
) -> list[PoolState]:
    """Return the pools that have workers or are in `names`, sorted by name.

    Every request in the queue counts as waiting for each pool that lacks capacity for the first
    request in the queue. If all pools have capacity, all requests count for the prefill pool. A
    yielded request counts for the decode pool. Prompt tokens count only for the pool that computes
    prompts.

    Args:
        workers: all configured workers.
        dispatcher: source of the queue.
        names: pools to include even if they have no worker.
        others: the other routers, whose queues are added.
    """
    members: dict[str, list[WorkerState]] = {name: [] for name in names}
    for worker in workers:
        if worker.role:
            members.setdefault(worker.role, []).append(worker)
    phases = dispatcher.phases()
    first = _first_pool(members, "prefill", "mixed", "decode")
    short = set(dispatcher.short_of) & members.keys() or {first}
    waiting = Counter(dict.fromkeys(short, phases[Phase.QUEUED]))
    waiting[_first_pool(members, "decode", "mixed", "prefill")] += phases[Phase.YIELDED]
    tokens = Counter({first: dispatcher.num_queued_tokens} if first in short else {})
    pools = [_pool(pool, members[pool], waiting[pool], tokens[pool]) for pool in sorted(members)]
    return [_with_others(pool, others) for pool in pools]


def _with_others(pool: PoolState, others: Sequence[RouterState]) -> PoolState:
    """Return the state of a pool, including the requests that wait for it at other routers."""
    queued = sum(each.queued.get(pool.pool, 0) for each in others)
    tokens = sum(each.queued_tokens.get(pool.pool, 0) for each in others)
    return replace(pool, waiting=pool.waiting + queued, waiting_tokens=pool.waiting_tokens + tokens)


def _first_pool(members: Mapping[str, object], *roles: str) -> str:
    """Return the first of `roles` that has a pool, or an empty string."""
    return next((role for role in roles if role in members), "")


def _pool(pool: str, members: Sequence[WorkerState], queued: int, tokens: int) -> PoolState:
    loads = [worker.numbers.load for worker in members if worker.numbers is not None]
    return PoolState(
        pool=pool,
        workers=len(members),
        ready=sum(worker.state == "ready" for worker in members),
        running=sum(each.running for each in loads),
        waiting=queued + sum(each.queued for each in loads),
        waiting_tokens=tokens + sum(each.queued_tokens for each in loads),
        queued=queued,
        queued_tokens=tokens,
    )
