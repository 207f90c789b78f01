"""The open requests of a router: the state of each request, and the workers that hold it."""

from collections import Counter
from collections.abc import Collection, Sequence

from penstock.router.routing import request_state, worker_view
from penstock.router.routing.decisions import DecisionListener
from penstock.router.routing.events import Command, Status
from penstock.router.routing.placement.cached_prefix import CachedPrefix
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.policy import Placement, Policy
from penstock.router.routing.placement.prefix_knowledge import PrefixKnowledge
from penstock.router.routing.prefix_cache.cache_claims import CacheClaim, CacheClaims
from penstock.router.routing.prefix_cache.prefix_index import PrefixIndex
from penstock.router.routing.queue.admission import queued_request
from penstock.router.routing.queue.fair_queue import FairQueue
from penstock.router.routing.queue.recovery_throttle import RecoveryThrottle
from penstock.router.routing.queue.slo_order import prefill_capacity
from penstock.router.routing.queue.timeouts import why_too_late
from penstock.router.routing.request_state import RequestState
from penstock.router.routing.worker_registry import WorkerRegistry
from penstock.router.routing.worker_view import ResourceUsage, WorkerView

MAX_EXPIRED = 128
"""Maximum number of requests that one tick ends because they exceed a time limit.

All requests of a call have the same deadline. Ending 128 of them takes about 4 ms.
"""
MAX_ASSIGNED = 32
"""Maximum number of queued requests that one event places or ends; this takes about 5 ms."""


class RequestTable:
    """Keeps the state and the workers of each open request, and queues the requests.

    Each waiting request is assigned to the workers that the routing policy chooses.
    """

    def __init__(
        self,
        policy: Policy,
        registry: WorkerRegistry,
        queue: FairQueue,
        throttle: RecoveryThrottle,
        prefix_index: PrefixIndex,
    ) -> None:
        self._prefixes = PrefixKnowledge(prefix_index)
        self.claims = CacheClaims(prefix_index)
        self._policy = policy
        self._registry = registry
        self._queue, self._throttle = queue, throttle
        self.states: dict[int, RequestState] = {}
        # For each request, the workers whose views list the request.
        self._holders: dict[int, list[str]] = {}
        self.num_ended: Counter[Status] = Counter()
        # Number of placed prompts by the text of their `PrefillDecision`.
        self.num_prefill_decisions: Counter[str] = Counter()
        self.dirty = False  # whether a queued request may fit now (see `assign_waiting`)
        self.listener = DecisionListener()

    @property
    def num_waiting(self) -> int:
        """Number of requests that are queued or held back."""
        return len(self._queue) + len(self._throttle)

    def is_waiting(self, request: int) -> bool:
        """Return whether a request is queued or held back."""
        return request in self._queue or request in self._throttle

    def admit(self, state: RequestState) -> None:
        """Queue a new request. A request that has already ended is only added to `num_ended`."""
        if state.status is not None:
            self.num_ended[state.status] += 1
            return
        self.states[state.request.id] = state
        self._queue.add(queued_request(state, is_requeued=False))
        self.dirty = True

    def reconcile(self, state: RequestState, out: list[Command], now: float) -> None:
        """Update the queue and the worker views after the state of a request has changed.

        A request that is no longer on any worker is placed again or queued.
        """
        request = state.request.id
        self.dirty = True
        if state.status is not None:
            self._remove_from_views(request)
            self._prefixes.computed(request, now)
            del self.states[request]
            self.num_ended[state.status] += 1
            self._queue.remove(request)
            self._throttle.discard(request)
            return
        if state.is_unassigned and not self.is_waiting(request):
            if state.lease is None:
                self._prefixes.withdrawn(request)
            self._reassign(state, out, now)
        self._update_views(state, now)

    def recover(self, state: RequestState, out: list[Command], now: float) -> None:
        """Variant of `reconcile` for a request of a lost worker. The request is held back first."""
        if state.status is None:
            self._throttle.add(state.request.id)
        self.reconcile(state, out, now)

    def started(self, state: RequestState, now: float) -> None:
        """Record that a request has a new token, so that the next held request may be released."""
        self._throttle.discard(state.request.id)
        self._prefixes.computed(state.request.id, now)

    def assign_waiting(self, out: list[Command], now: float) -> None:
        """Place queued requests in queue order while workers have room.

        At most `MAX_ASSIGNED` requests are placed or ended. `dirty` stays True if some may be left.
        """
        for request in self._throttle.release(len(self._registry)):
            self._queue.add(queued_request(self.states[request], is_requeued=True))
        views = self._registry.views() if len(self._queue) else ()
        for _ in range(MAX_ASSIGNED):
            head = self._next_request(views, now)
            if head is None or not self._assign_or_end(self.states[head], views, out, now):
                self.dirty = False
                return

    def _assign_or_end(
        self, state: RequestState, views: Sequence[WorkerView], out: list[Command], now: float
    ) -> bool:
        """Place the next queued request, or end it if it cannot run; return False if it waits."""
        if self._end_if_late(state, views, out, now):
            return True
        demand = self._demand(state, now)
        placement = self._choose(demand, views, now)
        if placement is not None:
            self._queue.dequeue(state.request.id, now)
            self.listener.placed(state, placement, demand, views, now)
            self._assign(state, placement, demand.num_uncached(placement.worker), out, now)
            state.cache_claim = claim_of(state, demand, placement.worker, self.claims)
            self._update_views(state, now)
            return True
        has_ended = self.end_if_unfit(state, "the request fits on no worker", out, now)
        return has_ended or self._end_if_overdue(state, views, out, now)

    def _end_if_late(
        self, state: RequestState, views: Sequence[WorkerView], out: list[Command], now: float
    ) -> bool:
        """End a request that cannot meet its deadline; return whether it ended."""
        too_late = why_too_late(state, views, now)
        if too_late:
            state.end(Status.DEADLINE, too_late, out)
            self.reconcile(state, out, now)
        return bool(too_late)

    def _end_if_overdue(
        self, state: RequestState, views: Sequence[WorkerView], out: list[Command], now: float
    ) -> bool:
        """End a request that has waited too long for room on a worker; return whether it ended."""
        is_overdue = self._queue.has_waited_too_long(state.request.id, now)
        if not is_overdue or not any(view.can_wait_for for view in views):
            return False
        message = f"no worker had room for {now - state.arrived_at:.1f} s: try again later"
        retry_after = self._queue.retry_after(queued_request(state, is_requeued=False), now)
        state.end(Status.OVERLOADED, message, out, retry_after)
        self.reconcile(state, out, now)
        return True

    def _next_request(self, views: Sequence[WorkerView], now: float) -> int | None:
        """Return the next request to place, or None if no request can be placed now."""
        if not (self._registry.queues_at_router and len(self._queue)):
            return self._queue.head()
        return self._queue.select(now, prefill_capacity(views))

    def busy_since(self, view: WorkerView) -> float | None:
        """Return since when a worker has runnable work, or None (see `runnable_since`)."""
        return runnable_since(view.name, [self.states[request] for request in view.requests])

    def short_of(self) -> Collection[str]:
        """Return the roles that have no worker with room for the next queued request."""
        head = self._queue.head()
        if head is None:
            return ()
        state = self.states[head]
        size = (state.token_log.num_known, state.request.num_sequences)
        usable = [
            view for view in self._registry.views() if view.is_usable and view.has_capacity(*size)
        ]
        if state.lease is None:  # without a lease, a worker must still compute the prompt
            usable = [view for view in usable if view.role == "decode" or view.has_prefill_slot]
        return {"prefill", "decode", "mixed"} - {view.role for view in usable}

    def alternative(self, state: RequestState, now: float) -> WorkerView | None:
        """Return the worker that the policy would choose for a request now, or None."""
        placement = self._choose(self._demand(state, now), self._registry.views(), now)
        return None if placement is None else self._registry.get(placement.worker)

    def end_if_unfit(
        self, state: RequestState, reason: str, out: list[Command], now: float
    ) -> bool:
        """End a request that can never fit on any remaining worker; return whether it ended."""
        staying = [view for view in self._registry.views() if view.can_wait_for]
        if not staying or any(view.name not in state.unfit_workers for view in staying):
            return False
        state.end(Status.INVALID, reason, out)
        self.reconcile(state, out, now)
        return True

    # -------------------------------------------------------------- placing requests

    def _choose(self, demand: Demand, views: Sequence[WorkerView], now: float) -> Placement | None:
        return self._policy.choose(demand, views, self._registry.transfer_costs, now)

    def _demand(self, state: RequestState, now: float) -> Demand:
        num_queued = self._queue.num_tokens if self._registry.queues_at_router else 0
        return demand_of(state, num_queued, self._registry.tpot_slo_seconds, self._prefixes, now)

    def _reassign(self, state: RequestState, out: list[Command], now: float) -> None:
        """Submit a request to its `decode_target` if that worker is usable; else queue it again."""
        view = self._registry.get(state.decode_target)
        if view is not None and view.is_usable and not view.is_backed_off:
            self._assign(state, Placement(view.name), state.token_log.num_known, out, now)
        else:
            state.decode_target = None
            self._queue.add(queued_request(state, is_requeued=True))

    def _assign(
        self,
        state: RequestState,
        placement: Placement,
        num_uncached: int,
        out: list[Command],
        now: float,
    ) -> None:
        view = self._registry.get(placement.worker)
        assert view is not None, "the policy chose a worker that is not connected"
        state.assign(view.info, placement.yield_after, out)
        state.decode_target = placement.decode_target
        state.submitted_at = now
        if placement.decision is not None:
            self.num_prefill_decisions[str(placement.decision)] += 1
        if state.pending is None:  # the worker computes the prompt if no blocks are transferred
            self._prefixes.placed(state.request, view.name, view.info.block_size)
        num_tokens = num_uncached if state.pending is None else 0
        view.set_usage(state.request.id, usage_of(state, view), num_tokens)

    def _update_views(self, state: RequestState, now: float) -> None:
        """Record a request in the views of all workers that hold or will hold it."""
        state.update_runnable(now)
        self.listener.changed(state, now)
        request = state.request.id
        names = dict.fromkeys((*state.workers(), state.decode_target))
        views = [view for name in names if (view := self._registry.get(name)) is not None]
        self._remove_from_views(request, names)
        self._holders[request] = [view.name for view in views]
        lease = state.lease.worker if state.lease is not None else None
        for view in views:
            view.set_usage(request, None if view.name == lease else usage_of(state, view))

    def _remove_from_views(self, request: int, kept: Collection[str | None] = ()) -> None:
        """Remove a request from the views of its workers, except those named in `kept`."""
        for name in self._holders.pop(request, ()):
            view = None if name in kept else self._registry.get(name)
            if view is not None:
                view.remove(request)

    # -------------------------------------------------------------- invariants

    def check(self) -> None:
        """Assert that requests, queue and worker views agree."""
        self._queue.check()
        for request, state in self.states.items():
            request_state.check(state)
            assert state.is_unassigned == self.is_waiting(request), (
                "request must be either placed or queued"
            )
            assert not (request in self._queue and request in self._throttle), "queued twice"
            names = self._holders.get(request, [])
            for name in state.workers():
                assert self._registry.get(name) is not None, "an unknown worker holds the request"
                assert name in names, "a worker holds the request, but its view does not list it"
        for view in self._registry.views():
            worker_view.check(view)
            for request in view.requests:
                assert view.name in self._holders[request], "the worker does not hold the request"


def runnable_since(worker: str, states: Sequence[RequestState]) -> float | None:
    """Return the time since which a worker has had runnable work, or None if it has none.

    Work that waits for a KV transfer or for another worker is not runnable. The result is None
    while the worker receives a transfer, since its other requests may wait for the blocks that the
    transfer has reserved.

    Args:
        worker: name of the worker.
        states: this router's requests on the worker; only these count.
    """
    if any(state.is_receiving(worker) for state in states):
        return None
    here = [state.computing for state in states if state.computing is not None]
    return min((hold.runnable_since for hold in here if hold.worker == worker), default=None)


def usage_of(state: RequestState, view: WorkerView) -> ResourceUsage:
    """Return the capacity that a request takes on a worker that holds or will hold it."""
    num_sequences = state.request.num_sequences
    num_answers = num_sequences if state.decode_target in (None, view.name) else 0
    return view.resource_usage(state.token_log.num_known, num_sequences, num_answers)


def demand_of(
    state: RequestState,
    router_queue_tokens: int,
    tpot_slo_seconds: float,
    prefixes: PrefixKnowledge,
    now: float,
) -> Demand:
    """Return the properties of a request that the policy uses."""
    return Demand(
        state.request.id,
        state.token_log.num_known,
        state.request.num_sequences,
        state.token_log.num_remaining,
        state.lease is not None or state.can_migrate_live,
        state.unfit_workers,
        state.request.num_beams == 0 and state.request.num_choices > 1,
        router_queue_tokens,
        tpot_slo_seconds,
        prefixes.cached_tokens(state.request, now),
        state.request.prompt_hashes,
    )


def claim_of(
    state: RequestState, demand: Demand, worker: str, claims: CacheClaims
) -> CacheClaim | None:
    """Return the prompt tokens that a worker must find in its cache, or None if that is unknown.

    Args:
        state: the request, which was placed on the worker just now.
        demand: its properties, as they were when the worker was chosen.
        worker: name of the worker.
        claims: makes the claim.
    """
    cached, num_tokens = demand.cached_tokens, len(state.request.prompt)
    # A request that resumes or that receives KV does not show what the worker has cached.
    if state.pending is not None or demand.num_tokens > num_tokens:
        return None
    if not isinstance(cached, CachedPrefix) or not cached.is_reported:
        return None
    # A worker computes at least the last token of a prompt.
    most = (num_tokens - 1) // cached.unit * cached.unit
    return claims.claim(worker, state.attempt, min(cached.get(worker, 0), most))
