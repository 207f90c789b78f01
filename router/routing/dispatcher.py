"""All requests and all workers: events in, commands out.

`Dispatcher.handle` is the one door of the deciding part of the router. What workers say goes to
`Reports`, what waits or has to move is the `Placer`'s, and each request's own state is its `Life`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.admission import Admission
from penstock.router.routing.events import (
    Arrived,
    Command,
    Cut,
    Draining,
    End,
    Event,
    Failed,
    Gone,
    Heard,
    Ready,
    Received,
    Rejected,
    RoleChanged,
    Status,
    Stepped,
    Tick,
    WorkerLost,
    WorkerUp,
    Yielded,
)
from penstock.router.routing.fleet import Bounds, Fleet
from penstock.router.routing.lifecycle import Life, Phase, phase_of
from penstock.router.routing.patience import Patience
from penstock.router.routing.placer import Pace, Placer
from penstock.router.routing.policy import Policy
from penstock.router.routing.prices import HandOverPrice
from penstock.router.routing.reports import Counters, Reports

Commands: TypeAlias = list[Command]


@dataclass(frozen=True, slots=True)
class Limits:
    max_queued: int = 1024  # requests that wait for their first worker
    max_queued_tokens: int = 4_000_000  # of their prompts
    promised_seconds: float = 0.0  # to first tokens: see `promised`; 0: by arrival
    wait_without_workers: float = 60.0  # seconds; then UNAVAILABLE
    recovering_per_worker: int = 4  # requests of lost workers that are recomputed at once
    max_gaps: int = 3  # then the stream is closed
    bounds: Bounds = field(default_factory=Bounds)


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

    def __init__(self, policy: Policy, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        promised = limits.promised_seconds
        self._fleet = Fleet(limits.bounds, shallow=promised > 0)
        self._queue = Admission(limits.max_queued, limits.max_queued_tokens, promised)
        pace = Pace(limits.recovering_per_worker)
        self._placer = Placer(policy, self._fleet, self._queue, pace)
        self._patience = Patience(limits.wait_without_workers)
        self._reports = reports = Reports(
            self._fleet, self._placer, self._queue, self._patience, limits.max_gaps
        )
        self._handlers: dict[type[Any], Callable[[Any, Commands, float], None]] = {
            Arrived: self._arrived,
            Gone: self._gone,
            Cut: self._cut,
            Tick: self._tick,
            WorkerUp: reports.worker_up,
            WorkerLost: reports.worker_lost,
            Draining: reports.draining,
            RoleChanged: reports.role_changed,
            Heard: reports.heard,
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
        if self._placer.stirred:
            self._placer.place_waiting(out, now)
        return out

    # -------------------------------------------------------------- clients and time

    def _arrived(self, event: Arrived, out: Commands, now: float) -> None:
        request = event.request
        if request.id in self._placer.lives:
            raise ValueError(f"request {request.id} is here already: numbers are used once")
        life = Life(request)
        life.since = now
        if life.log.complete:
            life.log.deliver_ends(out)
            life.end(Status.OK, "", out)
        elif self._queue.is_full(len(request.prompt)):
            life.status = Status.OVERLOADED
            retry_after = self._queue.retry_after(now)
            message = f"{len(self._queue)} requests are waiting already: try again later"
            out.append(End(request.id, life.status, message, retry_after))
        else:
            self._patience.add(life)
        self._placer.admit(life)

    def _gone(self, event: Gone, out: Commands, now: float) -> None:
        life = self._placer.lives.get(event.request)
        if life is not None:
            life.end(Status.CANCELLED, "the client went away", out)
            self._placer.settle(life, out, now)

    def _cut(self, event: Cut, out: Commands, now: float) -> None:
        life = self._placer.lives.get(event.request)
        if life is not None:
            life.cut(event.choice, event.length, out)
            self._placer.settle(life, out, now)

    def _tick(self, event: Tick, out: Commands, now: float) -> None:
        for life, status, message in self._patience.over(self._placer.lives, now):
            life.end(status, message, out)
            self._placer.settle(life, out, now)
        suspects, silent = self._fleet.look(now)
        for view in silent:
            seconds = now - view.heard
            self._reports.hang_up(view, f"silent for {seconds:.1f} seconds", out, now)
        for view in self._fleet.stuck(self._placer.busy_since, now):
            seconds = now - view.moved
            reason = f"it answers, but no step of it has ended for {seconds:.1f} seconds"
            self._reports.hang_up(view, reason, out, now)
        leaving = [view for view in self._fleet.views() if view.draining or view.sheds]
        for view in (*suspects, *leaving):
            self._placer.clear(view, out, now)
        self._placer.look_at_sources(out, now)
        self._placer.revise(out, now)
        self._placer.stirred = True

    # -------------------------------------------------------------- looking

    @property
    def num_requests(self) -> int:
        return len(self._placer.lives)

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
    def num_decided(self) -> Mapping[str, int]:
        """Where prompts were to be computed, and why; see `disaggregation.Reason`."""
        return self._placer.num_decided

    @property
    def num_revised(self) -> int:
        """Requests taken back from a worker that had no room for them yet."""
        return self._placer.num_revised

    @property
    def handover(self) -> HandOverPrice:
        """What hand-overs took, of late."""
        return self._fleet.handover

    @property
    def roles(self) -> Mapping[str, str]:
        """What workers were made by an operator."""
        return self._fleet.roles

    @property
    def counters(self) -> Counters:
        return self._reports.counters

    def phases(self) -> Counter[Phase]:
        """How many requests are in which state."""
        return Counter(phase_of(life) for life in self._placer.lives.values())

    def workers(self) -> Sequence[WorkerStatus]:
        return [
            WorkerStatus(
                view.name,
                view.info.incarnation,
                view.role,
                view.state,
                len(view.holds),
                view.load,
            )
            for view in self._fleet.views()
        ]

    def check(self) -> None:
        """AssertionError if what is "always true" in `docs/lifecycle.md` is not, as far as it can
        be seen from here."""
        self._placer.check()
