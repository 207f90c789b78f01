"""Handles worker events: updates requests and worker views, and creates the resulting commands."""

from typing import TypeAlias

from penstock.router.routing.counters import Counters
from penstock.router.routing.events import (
    Command,
    Deliver,
    Draining,
    Drop,
    Failed,
    Heartbeat,
    Ready,
    Received,
    Rejected,
    RoleChanged,
    Stepped,
    WorkerUp,
    Yielded,
)
from penstock.router.routing.failover import Failover
from penstock.router.routing.placement.migration import RequestMigrator
from penstock.router.routing.prefix_cache.cache_feed import CacheFeed
from penstock.router.routing.queue.fair_queue import FairQueue
from penstock.router.routing.queue.timeouts import RequestTimeouts
from penstock.router.routing.request_state import RequestState
from penstock.router.routing.request_table import RequestTable
from penstock.router.routing.token_log import AppendResult
from penstock.router.routing.worker_registry import WorkerRegistry
from penstock.router.routing.worker_view import WorkerView, has_busy_peer

Commands: TypeAlias = list[Command]


class WorkerEventHandler:
    """Handlers of worker events, which update requests and worker views, and append commands."""

    def __init__(
        self,
        registry: WorkerRegistry,
        requests: RequestTable,
        migrator: RequestMigrator,
        queue: FairQueue,
        timeouts: RequestTimeouts,
        failover: Failover,
        cache_feed: CacheFeed,
        counters: Counters,
        max_gaps: int,
    ) -> None:
        self._registry = registry
        self._requests = requests
        self._migrator = migrator
        self._states = requests.states
        self._charge_output = queue.charge_output
        self._timeouts = timeouts
        self._failover = failover
        self._cache_feed = cache_feed
        self._counters = counters
        self._max_gaps = max_gaps

    # -------------------------------------------------------------- workers

    def worker_up(self, event: WorkerUp, out: Commands, now: float) -> None:
        # A new stream has no requests, so remove the worker's old ones.
        self._failover.remove_worker(event.info.worker, out, now)
        self._registry.add(event.info, event.load, now)
        self._timeouts.workers_changed(self._registry, now)
        self._requests.dirty = True

    def draining(self, event: Draining, out: Commands, now: float) -> None:
        view = self._touch(event.worker, now)
        if view is not None:
            view.draining = True
            self._timeouts.workers_changed(self._registry, now)
            self._migrator.evacuate(view, out, now)

    def role_changed(self, event: RoleChanged, out: Commands, now: float) -> None:
        view = self._registry.assign(event.worker, event.role)
        if view is not None:
            self._requests.dirty = True
            if view.is_shedding:
                self._migrator.evacuate(view, out, now)

    def heartbeat(self, event: Heartbeat, out: Commands, now: float) -> None:
        self._touch(event.worker, now)

    def _touch(self, worker: str, now: float) -> WorkerView | None:
        view = self._registry.get(worker)
        if view is not None:
            view.last_received = now
            if view.suspect:
                view.suspect = False
                self._requests.dirty = True
        return view

    # -------------------------------------------------------------- tokens

    def stepped(self, event: Stepped, out: Commands, now: float) -> None:
        view = self._touch(event.worker, now)
        if view is None:
            return
        for request, attempt, num_tokens in event.cached:
            state = self._states.get(request)
            if state is not None:
                state.record_cached(event.worker, attempt, num_tokens, out)
                self._check_claim(state, event.worker, attempt, num_tokens, out, now)
        if event.prompts:
            self._prompts_scored(event, view, out, now)
        if event.tokens:
            self._append_tokens(event, view, out, now)
        for request, attempt, reason in event.ended:
            state = self._states.get(request)
            if state is not None and state.aborted(event.worker, attempt, reason, out):
                self._requests.reconcile(state, out, now)
        self._reported(view, event, now)

    def _check_claim(
        self,
        state: RequestState,
        worker: str,
        attempt: int,
        num_found: int,
        out: Commands,
        now: float,
    ) -> None:
        """Compare the cached tokens that a worker has found with those that it had reported."""
        claim = state.cache_claim
        if claim is None or (claim.worker, claim.attempt) != (worker, attempt):
            return
        if self._requests.claims.is_refuted(claim, num_found):
            resync = self._cache_feed.distrust(worker, now)
            if resync is not None:
                out.append(resync)

    def _append_tokens(self, event: Stepped, view: WorkerView, out: Commands, now: float) -> None:
        """Append a step's tokens to their requests and deliver them with one command.

        This runs for every token: keep it fast.
        """
        worker, states, tokens = event.worker, self._states, event.tokens
        appended = AppendResult.APPENDED
        counts: dict[str, int] = {}  # appended tokens by tenant that are not charged yet
        refused: list[int] = []
        after: Commands = []  # commands to send after the tokens
        for row, (request, attempt, choice, position, token, finish) in enumerate(tokens.rows()):
            state = states.get(request)
            if state is None:
                refused.append(row)
                continue
            result = state.append(worker, attempt, choice, position, token, finish, after)
            if result is appended:
                tenant = state.request.tenant
                counts[tenant] = counts.get(tenant, 0) + 1
                continue
            if result is not AppendResult.STATE_CHANGED:
                refused.append(row)
            if result is not AppendResult.DUPLICATE:
                self._charge(counts)  # charge first, because the queue order depends on it
                self._state_changed(state, result, view, after, now)
        self._charge(counts)
        if refused:
            accepted = set(range(len(tokens))).difference(refused)
            tokens = tokens.select(sorted(accepted))
        if tokens:
            out.append(Deliver(tokens))
        out += after

    def _charge(self, counts: dict[str, int]) -> None:
        """Charge generated tokens to their tenants and clear `counts`."""
        for tenant, number in counts.items():
            self._charge_output(tenant, number)
        counts.clear()

    def _reported(self, view: WorkerView, event: Stepped, now: float) -> None:
        if event.tokens or event.prompts:
            view.last_progress = now
        if event.load is None:
            return
        was_stuck, could_begin = view.stuck, view.has_prefill_slot
        self._requests.dirty |= view.is_backed_off or was_stuck
        view.update_load(event.load, now, has_busy_peer(view, self._registry.views()))
        self._requests.dirty |= view.has_prefill_slot and not could_begin
        if was_stuck:
            self._timeouts.workers_changed(self._registry, now)

    def _prompts_scored(self, event: Stepped, view: WorkerView, out: Commands, now: float) -> None:
        for scored in event.prompts:
            state = self._states.get(scored.request)
            if state is not None:
                taken = state.append_prompt_logprobs(event.worker, scored, out)
                if taken in (AppendResult.GAP, AppendResult.MOVED):
                    self._state_changed(state, taken, view, out, now)

    def _state_changed(
        self, state: RequestState, result: AppendResult, view: WorkerView, out: Commands, now: float
    ) -> None:
        if result is AppendResult.GAP:
            self._on_gap(state, view, out, now)
            return
        if result is AppendResult.STATE_CHANGED:
            self._charge_output(state.request.tenant, 1)
            self._requests.started(state, now)
        self._requests.reconcile(state, out, now)

    def _on_gap(self, state: RequestState, view: WorkerView, out: Commands, now: float) -> None:
        self._counters.num_gaps += 1
        view.num_gaps += 1
        state.fail_attempt(out)
        self._requests.reconcile(state, out, now)
        if view.num_gaps == self._max_gaps:
            self._failover.close_stream(
                view, f"tokens were missing {view.num_gaps} times", out, now
            )

    # -------------------------------------------------------------- KV transfer

    def yielded(self, event: Yielded, out: Commands, now: float) -> None:
        state = self._state_of(event, out, now)
        if state is not None:
            state.yielded(event.worker, event.attempt, event.kv_len, out)
            self._requests.reconcile(state, out, now)

    def ready(self, event: Ready, out: Commands, now: float) -> None:
        state = self._state_of(event, out, now)
        if state is not None:
            state.ready(event, out)
            self._note_transfer(state, event, now)
            self._requests.reconcile(state, out, now)

    def _note_transfer(self, state: RequestState, event: Ready, now: float) -> None:
        """Record the size and start time of a KV transfer, for the `TransferCostModel`."""
        pending, view = state.pending, self._registry.get(event.worker)
        if pending is None or pending.epoch != event.epoch or state.lease is None or view is None:
            return
        # If the worker has a queue, it waited for free blocks before it sent Ready. This wait does
        # not count as transfer time, because a prompt that the worker computes itself would wait as
        # well.
        since = now if view.load.queued else state.submitted_at
        state.transfer = (max(state.lease.kv_len - event.have, 0), since)

    def received(self, event: Received, out: Commands, now: float) -> None:
        state = self._state_of(event, out, now)
        if state is not None and state.received(event.worker, event.attempt, event.epoch, out):
            self._counters.num_transfers += 1
            if state.transfer is not None:
                num_tokens, since = state.transfer
                self._registry.transfer_costs.add(num_tokens, event.num_bytes, now - since)
                state.transfer = None
            self._requests.reconcile(state, out, now)

    def failed(self, event: Failed, out: Commands, now: float) -> None:
        state = self._state_of(event, out, now)
        if state is not None:
            failed = state.failed(event.worker, event.attempt, event.epoch, out)
            self._counters.num_transfers_failed += failed
            self._requests.reconcile(state, out, now)

    def rejected(self, event: Rejected, out: Commands, now: float) -> None:
        state = self._state_of(event, out, now)
        if state is None or not state.rejected(event.worker, event.attempt, out):
            return
        if event.is_permanent:
            state.unfit_workers.update(self._registry.no_larger_than(event.worker))
        else:
            self._registry.back_off(event.worker, now)
        if not (state.is_unassigned and self._requests.end_if_unfit(state, event.reason, out, now)):
            self._requests.reconcile(state, out, now)

    def _state_of(
        self, event: Yielded | Ready | Received | Failed | Rejected, out: Commands, now: float
    ) -> RequestState | None:
        """Return the state of an event's request, or None if the request has ended.

        If Yielded or Ready arrives for an ended request, send Drop to release its blocks.
        """
        view = self._touch(event.worker, now)
        if view is None:
            return None
        state = self._states.get(event.request)
        if isinstance(event, Yielded | Ready):
            view.last_progress = now
            if state is None:
                out.append(Drop(event.worker, event.request, event.attempt))
        return state
