"""What several routers say of one cluster, as one. Pure.

Each knows the workers whole, for they say the same to all; each knows its own queue only.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.router.observability.role_registry import merged
from penstock.router.observability.snapshot import ClusterState, PoolState, RouterState, WorkerState


class ClusterAggregator:
    """Remembers what each router has counted before: one that begins anew counts from 0."""

    def __init__(self) -> None:
        self._counted: dict[str, int] = {}  # prompt tokens, by router
        self._total = 0

    def sum(self, states: Mapping[str, ClusterState | None]) -> ClusterState | None:
        """Of the routers by name; None of those that do not answer, and if none does."""
        received = {name: state for name, state in states.items() if state is not None}
        if not received:
            return None
        self._count(received)
        first, *others = received.values()
        each = (first, *others)
        return replace(
            first,
            not_ready="" if any(not one.not_ready for one in each) else first.not_ready,
            streams=sum(one.streams for one in each),
            waiting=sum(one.waiting for one in each),
            waiting_tokens=sum(one.waiting_tokens for one in each),
            prompt_tokens=self._total,
            workers=_workers(each),
            pools=_pools(each),
            roles=merged(*(one.roles for one in each)),
            placed=_prefill_decisions(each),
        )

    def _count(self, states: Mapping[str, ClusterState]) -> None:
        for name, state in states.items():
            new = state.prompt_tokens - self._counted.get(name, 0)
            self._total += new if new >= 0 else state.prompt_tokens
            self._counted[name] = state.prompt_tokens


def router_states(
    states: Mapping[str, ClusterState | None], addresses: Mapping[str, tuple[str, str]]
) -> list[RouterState]:
    """What every router is told of all: as each said of itself, with its addresses of HTTP and
    gRPC."""
    found = []
    for name, state in states.items():
        own = RouterState(name, "down")
        if state is not None:
            own = next((each for each in state.routers if each.router == name), own)
        http, grpc = addresses[name]
        found.append(replace(own, http=http, grpc=grpc))
    return found


def _prefill_decisions(states: Sequence[ClusterState]) -> dict[str, int]:
    """Each router's own."""
    total: Counter[str] = Counter()
    for state in states:
        total.update(state.placed)
    return dict(total)


def _workers(states: Sequence[ClusterState]) -> list[WorkerState]:
    """By name; of each worker what the first router says that has its numbers."""
    found: dict[str, WorkerState] = {}
    requests: dict[str, int] = {}
    for state in states:
        for worker in state.workers:
            requests[worker.worker] = requests.get(worker.worker, 0) + worker.requests
            known = found.get(worker.worker)
            if known is None or (known.numbers is None and worker.numbers is not None):
                found[worker.worker] = worker
    return [replace(found[name], requests=requests[name]) for name in sorted(found)]


def _pools(states: Sequence[ClusterState]) -> list[PoolState]:
    """By name; what waits at a router is in that router's own numbers only."""
    found: dict[str, list[PoolState]] = {}
    for state in states:
        for pool in state.pools:
            found.setdefault(pool.pool, []).append(pool)
    return [_pool(found[name]) for name in sorted(found)]


def _pool(states: Sequence[PoolState]) -> PoolState:
    best = max(states, key=lambda pool: (pool.ready, pool.workers))
    queued = sum(pool.queued for pool in states)
    tokens = sum(pool.queued_tokens for pool in states)
    return replace(best, queued=queued, queued_tokens=tokens)
