"""The dispatcher of a router: converts events into commands for all requests and workers.

`Dispatcher.handle` is the only entry point. `QueueAdmission` queues or refuses new requests,
`RequestTable` assigns queued requests to workers, `WorkerEventHandler` handles the messages of
workers, `Failover` restarts the requests of lost workers, and `RequestMigrator` moves placed
requests. A `RequestState` holds the state of one request. These classes are pure: they do no I/O
and read no clock.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.counters import Counters
from penstock.router.routing.decisions import DecisionListener
from penstock.router.routing.events import (
    AssignWaiting,
    ChoiceStopped,
    ClientDisconnected,
    Command,
    Draining,
    Event,
    Failed,
    Heartbeat,
    Ready,
    Received,
    Rejected,
    RequestArrived,
    RoleChanged,
    Status,
    Stepped,
    Tick,
    WorkerLost,
    WorkerUp,
    Yielded,
)
from penstock.router.routing.failover import Failover
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.migration import RequestMigrator
from penstock.router.routing.placement.policy import Policy
from penstock.router.routing.prefix_cache.cache_events import CacheEvents, CacheSnapshot
from penstock.router.routing.prefix_cache.cache_feed import CacheFeed
from penstock.router.routing.prefix_cache.prefix_index import PrefixIndex
from penstock.router.routing.queue.admission import QueueAdmission
from penstock.router.routing.queue.fair_queue import FairQueue
from penstock.router.routing.queue.recovery_throttle import RecoveryThrottle
from penstock.router.routing.queue.tenant_quotas import Amount
from penstock.router.routing.queue.timeouts import DEADLINE_PASSED, RequestTimeouts
from penstock.router.routing.request_state import Phase, RequestState, phase_of
from penstock.router.routing.request_table import MAX_EXPIRED, RequestTable
from penstock.router.routing.token_runs import TokenRun, append_runs
from penstock.router.routing.transfer_peers import TransferPeers
from penstock.router.routing.worker_events import WorkerEventHandler
from penstock.router.routing.worker_registry import LivenessBounds, WorkerRegistry

Commands: TypeAlias = list[Command]


SHORT_WAIT_SECONDS = 10.0
"""If `max_wait_seconds` is at most this value, prompts queue at the router, not at the workers.

`max_wait_seconds` limits only the wait at the router. A short limit must cover the whole wait for
the first token, so prompts must not wait at a worker as well. Compared with a longer limit, the
additional wait at a worker is small, and a queue at the worker keeps the worker busy.
"""


@dataclass(frozen=True, slots=True)
class DispatcherLimits:
    """Limits on the queue, on waiting times and on the recovery of requests."""

    max_queued: int = 1024  # requests that were never placed on a worker
    max_queued_tokens: int = 4_000_000  # prompt tokens of requests that were never placed
    max_queued_cost: int = 32_000_000  # prompt and answer tokens of requests that were never placed
    # A request is refused if it has waited longer than this in the queue, or is expected to.
    max_wait_seconds: float = math.inf
    # SLO on the time to first token (see `slo_order`). 0 means no SLO: prompts are then ordered by
    # arrival.
    ttft_slo_seconds: float = 0.0
    # SLO on the time per output token of running answers; 0 means no SLO.
    tpot_slo_seconds: float = 0.0
    no_worker_timeout_seconds: float = 60.0  # time without workers after which requests fail
    # Number of requests of lost workers that may be recomputed at the same time, per connected
    # worker.
    max_recovering_per_worker: int = 4
    max_gaps: int = 3  # a worker's stream is closed once tokens were missing this often
    bounds: LivenessBounds = field(default_factory=LivenessBounds)


# The class is not frozen, because creating an instance of a frozen class takes 3 times as long.
@dataclass(slots=True)
class WorkerStatus:
    """State of a worker, for status pages and metrics."""

    worker: str
    incarnation: str
    role: str
    state: str  # ready, suspect, stuck or draining
    num_requests: int  # this router's requests at the worker: running, queued, leased or incoming
    load: WorkerLoad
    # Number of the worker's cached blocks in this router's prefix index.
    num_indexed_blocks: int = 0


class Dispatcher:
    """The decision logic of a router, which converts events into commands.

    The argument `now` of the methods is the time in seconds on any monotonic clock.
    """

    def __init__(self, policy: Policy, limits: DispatcherLimits | None = None) -> None:
        self.prefix_index = PrefixIndex()  # index of the blocks that workers have cached
        limits = limits or DispatcherLimits()
        promised = limits.ttft_slo_seconds
        queues_at_router = promised > 0 or limits.max_wait_seconds <= SHORT_WAIT_SECONDS
        self._registry = WorkerRegistry(limits.bounds, queues_at_router, limits.tpot_slo_seconds)
        bounds = Amount(limits.max_queued, limits.max_queued_tokens, limits.max_queued_cost)
        self._queue = FairQueue(bounds, promised, limits.max_wait_seconds)
        pace = RecoveryThrottle(limits.max_recovering_per_worker)
        self._requests = RequestTable(policy, self._registry, self._queue, pace, self.prefix_index)
        self._migrator = RequestMigrator(self._requests, self._registry)
        self.cache_feed = CacheFeed(self.prefix_index)
        self._transfer_peers = TransferPeers()
        self._timeouts = RequestTimeouts(limits.no_worker_timeout_seconds)
        # Whether queued requests are left that could not be considered, to limit an event's work.
        self.has_more_to_assign = False
        self._admission = QueueAdmission(
            self._queue, self._timeouts, self._requests.states, self._requests.reconcile
        )
        self.counters = Counters()
        self._failover = Failover(self._registry, self._requests, self._timeouts, self.counters)
        components = self._registry, self._requests, self._migrator, self._queue, self._timeouts
        self._worker_events = reports = WorkerEventHandler(
            *components, self._failover, self.cache_feed, self.counters, limits.max_gaps
        )
        self._handlers: dict[type[Any], Callable[[Any, Commands, float], None]] = {
            RequestArrived: self._request_arrived,
            ClientDisconnected: self._client_disconnected,
            ChoiceStopped: self._choice_stopped,
            Tick: self._tick,
            AssignWaiting: self._assign_waiting,
            WorkerUp: self._worker_up,
            WorkerLost: self._worker_lost,
            CacheEvents: self._cache_changed,
            CacheSnapshot: self._cache_snapshot,
            Draining: reports.draining,
            RoleChanged: reports.role_changed,
            Heartbeat: reports.heartbeat,
            Stepped: reports.stepped,
            Yielded: reports.yielded,
            Ready: reports.ready,
            Received: reports.received,
            Failed: reports.failed,
            Rejected: reports.rejected,
        }

    def handle(self, event: Event, now: float) -> Commands:
        """Return the commands that follow from an event, in order of execution.

        If `has_more_to_assign` is then true, the caller must soon handle an `AssignWaiting` event.
        Until then, other events than ticks place no queued requests.
        """
        out: Commands = []
        self._handlers[type(event)](event, out, now)
        may_assign = not self.has_more_to_assign or isinstance(event, AssignWaiting | Tick)
        if self._requests.dirty and may_assign:
            self._requests.assign_waiting(out, now)
            self.has_more_to_assign = self._requests.dirty
        return out

    def listen(self, listener: DecisionListener) -> None:
        """Report the decisions about requests to `listener`, which replaces the previous one."""
        self._requests.listener = listener

    def append_runs(self, worker: str, runs: Sequence[TokenRun]) -> bool:
        """Append the tokens of several steps of a worker in one call, without delivering them.

        The result is the same as after one `Stepped` event per step, but takes a fraction of the
        time. Simulations use this method and deliver the tokens to the clients themselves.

        Args:
            worker: name of the worker.
            runs: the tokens of each sequence; no sequence may be in two runs.

        Returns:
            False, without any change, if a token might change more than the log of its request.
        """
        return append_runs(worker, runs, self._requests.states, self._queue.charge_output)

    # -------------------------------------------------------------- clients and time

    def _request_arrived(self, event: RequestArrived, out: Commands, now: float) -> None:
        request = event.request
        if request.id in self._requests.states:
            raise ValueError(f"request {request.id} already exists: request ids must be unique")
        state = RequestState(request)
        state.arrived_at = now
        if state.token_log.is_complete:
            state.token_log.deliver_ends(out)
            state.end(Status.OK, "", out)
        elif request.deadline <= now:
            state.end(Status.DEADLINE, DEADLINE_PASSED, out)
        else:
            self._admission.admit(state, out, now)
        self._requests.admit(state)

    def _client_disconnected(self, event: ClientDisconnected, out: Commands, now: float) -> None:
        state = self._requests.states.get(event.request)
        if state is not None:
            state.end(Status.CANCELLED, "the client went away", out)
            self._requests.reconcile(state, out, now)

    def _choice_stopped(self, event: ChoiceStopped, out: Commands, now: float) -> None:
        state = self._requests.states.get(event.request)
        if state is not None:
            state.stop_choice(event.choice, event.length, out)
            self._requests.reconcile(state, out, now)

    def _tick(self, event: Tick, out: Commands, now: float) -> None:
        expired = self._timeouts.expired(self._requests.states, now)
        for state, status, message in islice(expired, MAX_EXPIRED):
            state.end(status, message, out)
            self._requests.reconcile(state, out, now)
        suspects, silent = self._registry.check_liveness(now)
        for view in silent:
            reason = f"silent for {now - view.last_received:.1f} seconds"
            self._failover.close_stream(view, reason, out, now)
        for view in self._registry.find_stuck(self._requests.busy_since, now):
            seconds = now - view.last_progress
            reason = f"the worker responds, but has completed no step for {seconds:.1f} seconds"
            self._failover.close_stream(view, reason, out, now)
        leaving = [view for view in self._registry.views() if view.draining or view.is_shedding]
        for view in (*suspects, *leaving):
            self._migrator.evacuate(view, out, now)
        for state in [one for one in self._requests.states.values() if one.pending is not None]:
            if state.check_source(out):
                self._requests.reconcile(state, out, now)
        self._migrator.rebalance(out, now)
        self.prefix_index.purge()
        peers = self._transfer_peers.due_commands(self._registry.views())
        out += (*self.cache_feed.due_resyncs(now), *peers)
        self._migrator.return_answers(out, now)
        self._requests.dirty = True

    def _assign_waiting(self, event: AssignWaiting, out: Commands, now: float) -> None:
        """Do nothing, because `handle` places queued requests after the event."""

    # -------------------------------------------------------------- workers, cached blocks

    def _worker_up(self, event: WorkerUp, out: Commands, now: float) -> None:
        info = event.info
        self.cache_feed.worker_up(info.worker, info.incarnation, info.num_blocks, now)
        self._worker_events.worker_up(event, out, now)

    def _worker_lost(self, event: WorkerLost, out: Commands, now: float) -> None:
        self.cache_feed.worker_lost(event.worker)
        self._failover.remove_worker(event.worker, out, now)

    def _cache_changed(self, event: CacheEvents, out: Commands, now: float) -> None:
        resync = self.cache_feed.apply_events(event, now)
        if resync is not None:
            out.append(resync)

    def _cache_snapshot(self, event: CacheSnapshot, out: Commands, now: float) -> None:
        self._worker_events.heartbeat(Heartbeat(event.worker), out, now)
        resync = self.cache_feed.apply_snapshot(event, now)
        if resync is not None:
            out.append(resync)

    # -------------------------------------------------------------- state

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests.states)

    @property
    def num_queued(self) -> int:
        """Number of requests that are not assigned to a worker."""
        return self._requests.num_waiting

    @property
    def num_held_back(self) -> int:
        """Number of queued requests that are held back because their workers were lost."""
        return self._requests.num_waiting - len(self._queue)

    @property
    def num_queued_tokens(self) -> int:
        """Number of prompt tokens of requests that were never placed on a worker."""
        return self._queue.num_tokens

    @property
    def short_of(self) -> Collection[str]:
        """Roles whose workers all lack room for the next queued request."""
        return self._requests.short_of()

    @property
    def num_ended(self) -> Mapping[Status, int]:
        """Number of ended requests by status."""
        return self._requests.num_ended

    @property
    def num_prefill_decisions(self) -> Mapping[str, int]:
        """Number of prompts by prefill decision, for example "apart: unmeasured"."""
        return self._requests.num_prefill_decisions

    @property
    def num_rebalanced(self) -> int:
        """Number of times a request was moved away from a worker without room."""
        return self._migrator.num_rebalanced

    @property
    def num_returned(self) -> int:
        """Number of times an answer was moved from a prefill worker to a decode worker."""
        return self._migrator.num_returned

    @property
    def transfer_costs(self) -> TransferCostModel:
        """Model of the duration of KV transfers, fitted to recent transfers."""
        return self._registry.transfer_costs

    @property
    def roles(self) -> Mapping[str, str]:
        """Roles that operators assigned, by worker name."""
        return self._registry.roles

    def phases(self) -> Counter[Phase]:
        """Return the number of requests in each phase."""
        return Counter(phase_of(state) for state in self._requests.states.values())

    @property
    def ready_roles(self) -> Collection[str]:
        """Roles of the ready workers."""
        return {view.role for view in self._registry if view.state == "ready"}

    def workers(self) -> Sequence[WorkerStatus]:
        """Return the status of all connected workers."""
        return [
            WorkerStatus(
                view.name,
                view.info.incarnation,
                view.role,
                view.state,
                len(view.requests),
                view.load,
                self.prefix_index.num_blocks(view.name),
            )
            for view in self._registry.views()
        ]

    def check(self) -> None:
        """Assert the invariants of `docs/lifecycle.md` that a router can check."""
        self._requests.check()
