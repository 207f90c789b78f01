"""Merges the states that the routers of a cluster report. This module does no I/O.

Each worker reports its whole load to every router, but each router knows only its own queue.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.router.observability.role_registry import merged
from penstock.router.observability.snapshot import ClusterState, PoolState, RouterState, WorkerState


class ClusterAggregator:
    """Merges the states of all routers, and counts the prompt tokens of all routers.

    A restarted router counts its prompt tokens from 0 again. The aggregator therefore keeps the
    last total of each router, so that its own total never decreases.
    """

    def __init__(self) -> None:
        # The last total of prompt tokens that each router reported, by router name.
        self._counted: dict[str, int] = {}
        self._total = 0

    def sum(self, states: Mapping[str, ClusterState | None]) -> ClusterState | None:
        """Merge the states of the routers. Return None if no router replied.

        Args:
            states: state of each router, by router name. None stands for a router that did not
                reply.
        """
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
    states: Mapping[str, ClusterState | None], addresses: Mapping[str, tuple[str, str, str]]
) -> list[RouterState]:
    """Return the state of each router with its addresses.

    A router that did not reply has the state "down".

    Args:
        addresses: for each router, by name, the addresses of its HTTP, gRPC and operators' ports.
    """
    found = []
    for name, state in states.items():
        own = RouterState(name, "down")
        if state is not None:
            own = next((each for each in state.routers if each.router == name), own)
        http, grpc, _ = addresses[name]
        found.append(replace(own, http=http, grpc=grpc))
    return found


def _prefill_decisions(states: Sequence[ClusterState]) -> dict[str, int]:
    """Return how often each kind of prefill placement was chosen, summed over the routers."""
    total: Counter[str] = Counter()
    for state in states:
        total.update(state.placed)
    return dict(total)


def _workers(states: Sequence[ClusterState]) -> list[WorkerState]:
    """Return the states of all workers, sorted by name.

    A worker's state is that of the first router that knows the worker's statistics (`numbers`). The
    requests of all routers are added up.
    """
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
    """Return the states of all pools, sorted by name.

    The queue of a pool is the sum over all routers.
    """
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
