"""A router and its cluster at one moment, as plain numbers: for metrics and for status pages."""

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
"""States of a worker whose numbers are none, or too old to be told."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A worker's steps since its start."""

    bounds: Sequence[float]  # seconds, rising
    counts: Sequence[int]  # under each bound but not under the one before; the last: longer
    seconds: float  # of all together


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A worker's newest load, and the sizes that it relates to."""

    load: WorkerLoad
    max_sequences: int  # sequences that may run at once
    block_size: int  # tokens
    step_bounds: Sequence[float] = ()  # seconds, rising: see `WorkerLoad.step_counts`

    @property
    def kv_waste(self) -> float:
        """Share of the used blocks' slots that hold nothing."""
        slots = self.load.used_blocks * self.block_size
        return self.load.unwritten_slots / slots if slots else 0.0

    @property
    def blocks(self) -> Mapping[str, int]:
        """KV blocks by what they are."""
        load = self.load
        return {
            "used": load.used_blocks,
            "leased": load.leased_blocks,
            "reserved": load.reserved_blocks,
            "cached": load.cached_blocks,
            "free": load.free_blocks,
        }

    @property
    def prompt_tokens(self) -> int:
        """Total of prompt tokens, computed or found in the prefix cache."""
        return self.load.prompt_tokens_computed + self.load.prompt_tokens_cached

    @property
    def steps(self) -> StepTimes:
        """The histogram of steps; a single bucket if counts and bounds do not fit together."""
        bounds, counts = list(self.step_bounds), list(self.load.step_counts)
        if len(counts) != len(bounds) + 1:  # one odd worker must not cost the others their metrics
            return StepTimes((), (self.load.num_steps,), self.load.step_seconds)
        return StepTimes(bounds, counts, self.load.step_seconds)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker that the router is to use."""

    worker: str
    role: str  # prefill, decode or mixed; empty until it has introduced itself
    state: str  # ready, suspect, stuck, draining or down
    requests: int  # of this router, in any form
    numbers: WorkerStats | None  # None: nothing recent is known

    @property
    def up(self) -> bool:
        return self.state not in SILENT


@dataclass(frozen=True, slots=True)
class PoolState:
    """The workers of one role, and what waits for them."""

    pool: str
    workers: int  # that should be there
    ready: int
    running: int  # sequences
    waiting: int  # requests, at all routers and at the workers
    waiting_tokens: int
    queued: int  # of them, at this router
    queued_tokens: int


@dataclass(frozen=True, slots=True)
class PoolScaling:
    """What is done about a pool's size, and why."""

    pool: str
    least: int
    most: int
    desired: int  # workers
    pending: int  # that do not serve yet, or not again
    draining: int
    reason: str
    held_by: str  # what kept it from more, or from less; empty: nothing
    given_up: int = 0  # that could not be started; each is tried again later
    # Workers that its load asks for, by what asks: queue and occupancy.
    terms: Mapping[str, float] = field(default_factory=dict)
    waits: Sequence[str] = ()  # a line for each worker that starts or drains: for what, how long


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """A pool was to have another number of workers."""

    at: float  # seconds since 1970
    pool: str
    text: str  # from how many to how many, and why


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the supervisor says of the pools' sizes."""

    pools: Sequence[PoolScaling] = ()
    decisions: Sequence[ScalingDecision] = ()  # the last ones, in their order


@dataclass(frozen=True, slots=True)
class TransferCost:
    """What a KV transfer is expected to cost, from those of late; all 0 before the first."""

    fixed_seconds: float = 0.0  # of any
    bytes_per_second: float = 0.0
    bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class RouterState:
    """One of the routers that share the workers: what waits there, and where it listens."""

    router: str
    state: str  # ready, waiting (for workers), draining or down
    http: str = ""  # host:port; empty: not known
    grpc: str = ""
    streams: int = 0  # requests that have not ended
    waiting: int = 0  # of them, at the router
    waiting_tokens: int = 0
    queued: Mapping[str, int] = field(default_factory=dict)  # the same by pool
    queued_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What one router knows. Totals are since its start."""

    model: str
    version: str
    not_ready: str  # why not; empty: it serves
    streams: int  # requests that have not ended
    waiting: int  # of them, at the router
    waiting_tokens: int
    pools: Sequence[PoolState]
    workers: Sequence[WorkerState]
    finished: Mapping[str, int]  # requests by reason
    generated: Mapping[str, int]  # tokens of answers by tenant
    failovers: int
    kv_transfers: int
    kv_transfers_failed: int
    kv_transfer_bytes: int
    prompt_tokens: int  # of all requests that were taken
    scaling: Scaling
    prompt_tokens_by_tenant: Mapping[str, int] = field(default_factory=dict)  # the same by tenant
    roles: Mapping[str, Assignment] = field(default_factory=dict)  # given by operators, by worker
    placed: Mapping[str, int] = field(default_factory=dict)  # prompts, by where and why
    kv_transfer_cost: TransferCost = TransferCost()
    # Itself, and the others as the supervisor last told of them.
    routers: Sequence[RouterState] = ()


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
    """All that is known now: `own` by its name and state, `routers` as they were last told of."""
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
    """All workers that are wanted, by name; those that cannot be heard are told without numbers."""
    by_name = {status.worker: status for status in statuses}
    links = sorted(links, key=lambda link: link.worker)
    return [_worker(link, by_name.get(link.worker), roles.get(link.worker)) for link in links]


def _worker(link: WorkerLink, status: WorkerStatus | None, given: Assignment | None) -> WorkerState:
    state = DOWN if status is None else status.state
    numbers = None
    info = link.info
    if info is not None and link.load is not None and state not in SILENT:
        numbers = WorkerStats(link.load, info.max_sequences, info.block_size, info.step_bounds)
    role = "" if info is None else info.role if given is None else given.role
    return WorkerState(link.worker, role, state, status.num_requests if status else 0, numbers)


def snapshot_pools(
    workers: Sequence[WorkerState],
    dispatcher: Dispatcher,
    names: Sequence[str],
    others: Sequence[RouterState] = (),
) -> list[PoolState]:
    """The pools that there are, and those named, which may have no worker now; by name.

    What waits at the router waits for the pools that have no room for it, for both where both have
    none; else for the one that takes prompts. What has its blocks kept waits for the one that
    decodes. Prompt tokens wait only for a pool that is to compute them.
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
    """What waits at other routers waits for the pool too."""
    queued = sum(each.queued.get(pool.pool, 0) for each in others)
    tokens = sum(each.queued_tokens.get(pool.pool, 0) for each in others)
    return replace(pool, waiting=pool.waiting + queued, waiting_tokens=pool.waiting_tokens + tokens)


def _first_pool(members: Mapping[str, object], *roles: str) -> str:
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
