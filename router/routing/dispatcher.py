"""All requests and all workers: events in, commands out.

`Dispatcher.handle` is the one door of the deciding part of the router. What workers say goes to
`WorkerEventHandler`, what waits or has to move is the `Placer`'s, and each request's own state is
its `ProcessHandle`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.events import (
    ChoiceStopped,
    ClientDisconnected,
    Command,
    Draining,
    EndRequest,
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
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.placer import Placer, RecoveryThrottle
from penstock.router.routing.placement.policy import Policy
from penstock.router.routing.queue.fair_queue import FairQueue
from penstock.router.routing.queue.timeouts import RequestTimeouts
from penstock.router.routing.request_state import Phase, RequestState, phase_of
from penstock.router.routing.worker_events import Counters, WorkerEventHandler
from penstock.router.routing.worker_registry import LivenessBounds, WorkerRegistry

Commands: TypeAlias = list[Command]


@dataclass(frozen=True, slots=True)
class DispatcherLimits:
    max_queued: int = 1024  # requests that wait for their first worker
    max_queued_tokens: int = 4_000_000  # of their prompts
    ttft_slo_seconds: float = 0.0  # to first tokens: see `slo_order`; 0: by arrival
    no_worker_timeout_seconds: float = 60.0  # seconds; then UNAVAILABLE
    max_recovering_per_worker: int = 4  # requests of lost workers that are recomputed at once
    max_gaps: int = 3  # then the stream is closed
    bounds: LivenessBounds = field(default_factory=LivenessBounds)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker, for status pages and metrics."""

    worker: str
    incarnation: str
    role: str
    state: str  # ready, suspect, stuck or draining
    num_requests: int  # of this router, in any form
    load: WorkerLoad


class Dispatcher:
    """The deciding part of a router. `now` is any clock, in seconds, that never goes back."""

    def __init__(self, policy: Policy, limits: DispatcherLimits | None = None) -> None:
        limits = limits or DispatcherLimits()
        promised = limits.ttft_slo_seconds
        self._registry = WorkerRegistry(limits.bounds, queues_at_router=promised > 0)
        self._queue = FairQueue(limits.max_queued, limits.max_queued_tokens, promised)
        pace = RecoveryThrottle(limits.max_recovering_per_worker)
        self._placer = Placer(policy, self._registry, self._queue, pace)
        self._timeouts = RequestTimeouts(limits.no_worker_timeout_seconds)
        self._worker_events = reports = WorkerEventHandler(
            self._registry, self._placer, self._queue, self._timeouts, limits.max_gaps
        )
        self._handlers: dict[type[Any], Callable[[Any, Commands, float], None]] = {
            RequestArrived: self._request_arrived,
            ClientDisconnected: self._client_disconnected,
            ChoiceStopped: self._choice_stopped,
            Tick: self._tick,
            WorkerUp: reports.worker_up,
            WorkerLost: reports.worker_lost,
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
        """What is to be done about it, in this order."""
        out: Commands = []
        self._handlers[type(event)](event, out, now)
        if self._placer.dirty:
            self._placer.assign_waiting(out, now)
        return out

    # -------------------------------------------------------------- clients and time

    def _request_arrived(self, event: RequestArrived, out: Commands, now: float) -> None:
        request = event.request
        if request.id in self._placer.states:
            raise ValueError(f"request {request.id} is here already: numbers are used once")
        state = RequestState(request)
        state.arrived_at = now
        if state.token_log.is_complete:
            state.token_log.deliver_ends(out)
            state.end(Status.OK, "", out)
        elif self._queue.is_full(len(request.prompt)):
            state.status = Status.OVERLOADED
            retry_after = self._queue.retry_after(now)
            message = f"{len(self._queue)} requests are waiting already: try again later"
            out.append(EndRequest(request.id, state.status, message, retry_after))
        else:
            self._timeouts.add(state)
        self._placer.admit(state)

    def _client_disconnected(self, event: ClientDisconnected, out: Commands, now: float) -> None:
        state = self._placer.states.get(event.request)
        if state is not None:
            state.end(Status.CANCELLED, "the client went away", out)
            self._placer.reconcile(state, out, now)

    def _choice_stopped(self, event: ChoiceStopped, out: Commands, now: float) -> None:
        state = self._placer.states.get(event.request)
        if state is not None:
            state.stop_choice(event.choice, event.length, out)
            self._placer.reconcile(state, out, now)

    def _tick(self, event: Tick, out: Commands, now: float) -> None:
        for state, status, message in self._timeouts.expired(self._placer.states, now):
            state.end(status, message, out)
            self._placer.reconcile(state, out, now)
        suspects, silent = self._registry.check_liveness(now)
        for view in silent:
            seconds = now - view.last_received
            self._worker_events.close_stream(view, f"silent for {seconds:.1f} seconds", out, now)
        for view in self._registry.find_stuck(self._placer.busy_since, now):
            seconds = now - view.last_progress
            reason = f"it answers, but no step of it has ended for {seconds:.1f} seconds"
            self._worker_events.close_stream(view, reason, out, now)
        leaving = [view for view in self._registry.views() if view.draining or view.is_shedding]
        for view in (*suspects, *leaving):
            self._placer.evacuate(view, out, now)
        self._placer.check_sources(out, now)
        self._placer.rebalance(out, now)
        self._placer.dirty = True

    # -------------------------------------------------------------- looking

    @property
    def num_requests(self) -> int:
        return len(self._placer.states)

    @property
    def num_queued(self) -> int:
        """Requests that no worker is to run yet."""
        return self._placer.num_waiting

    @property
    def num_running(self) -> int:
        """Requests that a worker runs or is to run."""
        return self.num_requests - self.num_queued

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests that wait for their first worker."""
        return self._queue.num_tokens

    @property
    def short_of(self) -> Collection[str]:
        """The roles of which more workers, or emptier ones, would let the queue move on."""
        return self._placer.short_of()

    @property
    def num_ended(self) -> Mapping[Status, int]:
        return self._placer.num_ended

    @property
    def num_prefill_decisions(self) -> Mapping[str, int]:
        """Where prompts were to be computed, and why; see `disaggregation.Reason`."""
        return self._placer.num_prefill_decisions

    @property
    def num_rebalanced(self) -> int:
        """Requests taken back from a worker that had no room for them yet."""
        return self._placer.num_rebalanced

    @property
    def transfer_costs(self) -> TransferCostModel:
        """What KV transfers took, of late."""
        return self._registry.transfer_costs

    @property
    def roles(self) -> Mapping[str, str]:
        """What workers were made by an operator."""
        return self._registry.roles

    @property
    def counters(self) -> Counters:
        return self._worker_events.counters

    def phases(self) -> Counter[Phase]:
        """How many requests are in which state."""
        return Counter(phase_of(state) for state in self._placer.states.values())

    def workers(self) -> Sequence[WorkerStatus]:
        return [
            WorkerStatus(
                view.name,
                view.info.incarnation,
                view.role,
                view.state,
                len(view.requests),
                view.load,
            )
            for view in self._registry.views()
        ]

    def check(self) -> None:
        """AssertionError if what is "always true" in `docs/lifecycle.md` is not, as far as it can
        be seen from here."""
        self._placer.check()
