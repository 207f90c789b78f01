"""Keeps every request somewhere: in the line, on a worker, or on its way from one to another."""

from collections import Counter
from collections.abc import Collection, Sequence

from penstock.router.routing import request_state
from penstock.router.routing.events import Command, Status
from penstock.router.routing.placement.policy import Demand, Placement, Policy
from penstock.router.routing.placement.rebalancing import has_capacity_sooner, rebalance_delay
from penstock.router.routing.queue.fair_queue import FairQueue, QueuedRequest
from penstock.router.routing.queue.slo_order import prefill_capacity
from penstock.router.routing.request_state import RequestState
from penstock.router.routing.worker_registry import WorkerRegistry, WorkerView


class RecoveryThrottle:
    """Requests whose worker was lost: let back into the line a few at a time, so that one death
    does not trample the workers that are left."""

    def __init__(self, num_per_worker: int) -> None:
        self._num_per_worker = num_per_worker
        self._waiting: dict[int, None] = {}  # in order
        self._recovering: dict[int, None] = {}  # let go, their first new token not seen yet

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: int) -> bool:
        return request in self._waiting

    def add(self, request: int) -> None:
        self._recovering.pop(request, None)
        self._waiting[request] = None

    def release(self, num_workers: int) -> list[int]:
        num_free = self._num_per_worker * num_workers - len(self._recovering)
        released = list(self._waiting)[: max(num_free, 0)]
        for request in released:
            del self._waiting[request]
            self._recovering[request] = None
        return released

    def discard(self, request: int) -> None:
        """It has a token again, or has ended."""
        self._waiting.pop(request, None)
        self._recovering.pop(request, None)


class Placer:
    """Places what waits while workers have room, and moves what has to leave a worker."""

    def __init__(
        self, policy: Policy, registry: WorkerRegistry, queue: FairQueue, throttle: RecoveryThrottle
    ) -> None:
        self._policy = policy
        self._registry = registry
        self._queue = queue
        self._throttle = throttle
        self.states: dict[int, RequestState] = {}
        self._holders: dict[int, list[str]] = {}  # a request: the workers whose views hold it
        self.num_ended: Counter[Status] = Counter()
        self.num_prefill_decisions: Counter[str] = Counter()  # where prompts are computed, and why
        self.num_rebalanced = 0  # requests taken back from a worker that had no room for them yet
        self.dirty = False  # something changed that may give a waiting request room

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._throttle)

    def is_waiting(self, request: int) -> bool:
        return request in self._queue or request in self._throttle

    def admit(self, state: RequestState) -> None:
        """Take in a new request; one that has ended at the door is only counted."""
        if state.status is not None:
            self.num_ended[state.status] += 1
            return
        self.states[state.request.id] = state
        self._queue.add(_queued_request(state, is_requeued=False))
        self.dirty = True

    def reconcile(self, state: RequestState, out: list[Command], now: float) -> None:
        """Call after whatever changed where a request is: the views follow, and one that nobody
        has any more is placed again or waits."""
        request = state.request.id
        self.dirty = True
        if state.status is not None:
            self._remove_from_views(request)
            del self.states[request]
            self.num_ended[state.status] += 1
            self._queue.remove(request)
            self._throttle.discard(request)
            return
        if state.is_unassigned and not self.is_waiting(request):
            self._reassign(state, out, now)
        self._update_views(state, now)

    def recover(self, state: RequestState, out: list[Command], now: float) -> None:
        """Like `settle`, for one whose worker was lost under it."""
        if state.status is None:
            self._throttle.add(state.request.id)
        self.reconcile(state, out, now)

    def recovered(self, state: RequestState) -> None:
        self._throttle.discard(state.request.id)

    def assign_waiting(self, out: list[Command], now: float) -> None:
        """Place requests in their turn while workers have room."""
        for request in self._throttle.release(len(self._registry)):
            self._queue.add(_queued_request(self.states[request], is_requeued=True))
        views = self._registry.views() if len(self._queue) else ()
        while (head := self._next_request(views, now)) is not None:
            state = self.states[head]
            placement = self._choose(state, views, now)
            if placement is not None:
                self._queue.dequeue(head, now)
                self._assign(state, placement, out, now)
                self._update_views(state, now)
            elif not self.end_if_unfit(state, "it fits on no worker that is there", out, now):
                break
        self.dirty = False

    def _next_request(self, views: Sequence[WorkerView], now: float) -> int | None:
        """Whose turn it is; None: nobody's that could be placed now."""
        if not self._registry.queues_at_router:
            return self._queue.head()
        return self._queue.select(now, prefill_capacity(views)) if len(self._queue) else None

    def busy_since(self, view: WorkerView) -> float | None:
        """Since when that worker has had something to do for which it waits neither for blocks nor
        for another one to yield; None: it has nothing. What it receives blocks for has taken room,
        for which all else there may wait."""
        states = [self.states[request] for request in view.requests]
        if any(state.is_receiving(view.name) for state in states):
            return None
        here = [state.computing for state in states if state.computing is not None]
        return min((hold.runnable_since for hold in here if hold.worker == view.name), default=None)

    def short_of(self) -> Collection[str]:
        """The roles of which no worker has room for the request whose turn it is."""
        head = self._queue.head()
        if head is None:
            return ()
        state = self.states[head]
        size = (state.token_log.num_known, state.request.num_choices)
        usable = [
            view for view in self._registry.views() if view.is_usable and view.has_capacity(*size)
        ]
        if state.lease is None:  # its prompt is to be computed, which a decode worker seldom does
            usable = [view for view in usable if view.role == "decode" or view.has_prefill_slot]
        return {"prefill", "decode", "mixed"} - {view.role for view in usable}

    def end_if_unfit(
        self, state: RequestState, reason: str, out: list[Command], now: float
    ) -> bool:
        """End a request that fits on none of the workers that stay."""
        staying = [view for view in self._registry.views() if view.can_wait_for]
        if not staying or any(view.name not in state.unfit_workers for view in staying):
            return False
        state.end(Status.INVALID, reason, out)
        self.reconcile(state, out, now)
        return True

    # -------------------------------------------------------------- moving

    def evacuate(self, view: WorkerView, out: list[Command], now: float) -> None:
        """Move off a worker what can be moved: all of it when it drains; what it generates, as far
        as its blocks can move too, when it is to prefill; only what has not begun there when it is
        merely silent."""
        for request in list(view.requests):
            state = self.states[request]
            if state.decode_target == view.name:
                state.decode_target = None
                self.reconcile(state, out, now)
            if state.pending is not None and state.pending.worker == view.name:
                self._withdraw(state, view, out, now)
            elif state.running is not None and state.running.worker == view.name:
                if view.draining:
                    self._migrate_for_drain(state, out, now)
                elif (
                    view.is_shedding and not view.suspect and not state.running.yields_after_prefill
                ):
                    self._migrate_for_role(state, out, now)

    def _withdraw(
        self, state: RequestState, view: WorkerView, out: list[Command], now: float
    ) -> None:
        """From a worker that waits for room; blocks on their way are let arrive."""
        assert state.pending is not None
        if state.running is None and state.pending.epoch is not None:
            return
        if state.running is None or view.is_usable:
            other = self._alternative(state, now)
            if other is None or (view.is_usable and other.role == "prefill"):
                return
        state.cancel_pending(out)
        self.reconcile(state, out, now)

    def _migrate_for_drain(self, state: RequestState, out: list[Command], now: float) -> None:
        """Its worker drains: the next one is asked first, so that the stop is short."""
        assert state.running is not None
        if state.running.yielding or state.pending is not None:
            return
        view = self._alternative(state, now)
        if view is None:
            return
        if state.can_migrate_live and view.info.layout == state.running.info.layout:
            state.start_live_migration(view.info, out)
            self.reconcile(state, out, now)
        else:
            state.request_yield(out)

    def _migrate_for_role(self, state: RequestState, out: list[Command], now: float) -> None:
        """Its worker is to prefill now: it moves if its blocks can, and ends there if not."""
        assert state.running is not None
        if state.running.yielding or state.pending is not None or not state.can_migrate_live:
            return
        view = self._alternative(state, now)
        if view is None or view.role == "prefill" or view.info.layout != state.running.info.layout:
            return
        state.start_live_migration(view.info, out)
        self.reconcile(state, out, now)

    def check_sources(self, out: list[Command], now: float) -> None:
        """Nobody waits for blocks as long as a transfer may take once their source is gone."""
        for state in list(self.states.values()):
            if state.check_source(out):
                self.reconcile(state, out, now)

    def rebalance(self, out: list[Command], now: float) -> None:
        """Take back what waits for room at one worker while another one has it."""
        if not any(view.is_usable and not view.load.queued for view in self._registry.views()):
            return
        for state in list(self.states.values()):
            pending = state.pending
            if pending is None or state.lease is None or pending.epoch is not None:
                continue
            if now - state.submitted_at < rebalance_delay(state.num_rebalances):
                continue
            view, other = self._registry.get(pending.worker), self._alternative(state, now)
            if view is None or other is None or other is view:
                continue
            if has_capacity_sooner(
                other, view, state.token_log.num_known, state.request.num_sequences
            ):
                state.num_rebalances += 1
                self.num_rebalanced += 1
                state.cancel_pending(out)
                state.decode_target = other.name
                self.reconcile(state, out, now)

    def _alternative(self, state: RequestState, now: float) -> WorkerView | None:
        """Where it would be placed now."""
        placement = self._choose(state, self._registry.views(), now)
        return None if placement is None else self._registry.get(placement.worker)

    def _choose(
        self, state: RequestState, views: Sequence[WorkerView], now: float
    ) -> Placement | None:
        return self._policy.choose(self._demand(state), views, self._registry.transfer_costs, now)

    # -------------------------------------------------------------- placing

    def _demand(self, state: RequestState) -> Demand:
        return Demand(
            state.request.id,
            state.token_log.num_known,
            state.request.num_sequences,
            state.token_log.num_remaining,
            state.lease is not None or state.can_migrate_live,
            state.unfit_workers,
            state.request.num_beams == 0 and state.request.num_choices > 1,
            self._queue.num_tokens if self._registry.queues_at_router else 0,
        )

    def _reassign(self, state: RequestState, out: list[Command], now: float) -> None:
        view = self._registry.get(state.decode_target)
        if view is not None and view.is_usable and not view.is_backed_off:
            self._assign(state, Placement(view.name), out, now)
        else:
            state.decode_target = None
            self._queue.add(_queued_request(state, is_requeued=True))

    def _assign(
        self, state: RequestState, placement: Placement, out: list[Command], now: float
    ) -> None:
        view = self._registry.get(placement.worker)
        assert view is not None, "the policy chose a worker that is not there"
        state.assign(view.info, placement.yield_after, out)
        state.decode_target = placement.decode_target
        state.submitted_at = now
        if placement.decision is not None:
            self.num_prefill_decisions[str(placement.decision)] += 1
        num_tokens = state.token_log.num_known if state.pending is None else 0
        view.note_assigned(num_tokens, state.request.num_sequences)

    def _update_views(self, state: RequestState, now: float) -> None:
        """Enter a request into the views of all workers that have or will have something of it."""
        state.update_runnable(now)
        request, num_sequences = state.request.id, state.request.num_sequences
        self._remove_from_views(request)
        names = self._holders[request] = []
        lease = state.lease.worker if state.lease is not None else None
        for name in dict.fromkeys((*state.workers(), state.decode_target)):
            view = self._registry.get(name)
            if view is not None:
                names.append(view.name)
                usage = view.resource_usage(state.token_log.num_known, num_sequences)
                view.set_usage(request, None if view.name == lease else usage)

    def _remove_from_views(self, request: int) -> None:
        for name in self._holders.pop(request, ()):
            view = self._registry.get(name)
            if view is not None:
                view.remove(request)

    # -------------------------------------------------------------- always true

    def check(self) -> None:
        """AssertionError if requests, line and views do not agree."""
        self._queue.check()
        for request, state in self.states.items():
            request_state.check(state)
            assert state.is_unassigned == self.is_waiting(request), (
                "neither placed nor waiting, or both"
            )
            assert not (request in self._queue and request in self._throttle), "waits twice"
            names = self._holders.get(request, [])
            for name in state.workers():
                assert self._registry.get(name) is not None, "held by a worker that is not there"
                assert name in names, "held, but not counted"
        for view in self._registry.views():
            view.check()
            for request in view.requests:
                assert view.name in self._holders[request], "counted, but not held"


def _queued_request(state: RequestState, is_requeued: bool) -> QueuedRequest:
    request, num_tokens = state.request, len(state.request.prompt)
    return QueuedRequest(
        request.id, request.tenant, request.priority, num_tokens, is_requeued, state.arrived_at
    )
