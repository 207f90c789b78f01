"""The explanation of one request: its events, and the time that it spent in each phase."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from penstock.router.observability.event_log import is_client_safe
from penstock.router.observability.request_metrics import FinishedRequest
from penstock.router.routing import events as ev
from penstock.router.routing.placement.candidate_report import Candidate
from penstock.router.routing.placement.policy import Placement
from penstock.router.routing.request_state import Phase, RequestState, phase_of

MAX_EVENTS = 64
"""Number of events that are kept of a request; later ones are only counted."""
MAX_DETAIL = 200
"""Maximum number of characters of a worker's message that are kept."""


RequestMessage: TypeAlias = ev.Yielded | ev.Received | ev.Failed | ev.Rejected
"""Messages of workers that are recorded as events of the request that they are about."""


class Spent(IntEnum):
    """A phase in which a request spends time; the API uses the names in lower case."""

    QUEUE = 0  # the request waits at the router
    WORKER_QUEUE = 1  # the request waits at the worker that computes the prompt
    PREFILL = 2
    WAIT = 3  # the request has yielded and waits for room at its next worker
    TRANSFER = 4  # the request waits for the transfer of its KV blocks
    DECODE = 5
    RECOVERY = 6  # the request is queued or recomputed after it lost its worker or its KV


class ExplainedEvent(NamedTuple):
    """One event of a request. `docs/observability.md` lists the kinds."""

    seconds: float  # seconds since the request's arrival
    kind: str
    worker: str = ""
    other_worker: str = ""  # the decode worker, or the source of a transfer
    detail: str = ""
    tokens: int = 0
    num_bytes: int = 0
    candidates: Sequence[Candidate] = ()
    num_workers: int = 0


class ExplainedRequest:
    """The recorded events and times of one request, without its prompt and answer.

    Args:
        request: the request.
        tenant_name: name of the API key.
        arrived_at: seconds since 1970.
        now: time of arrival, in seconds of the router's monotonic clock.
    """

    __slots__ = (
        *("number", "request_id", "tenant", "tenant_name", "arrived_at", "num_choices"),
        *("num_prompt", "num_cached", "num_tokens", "prefill_steps", "first_token", "seconds"),
        *("num_preemptions", "num_failovers", "num_migrations", "num_bytes"),
        *("finish_reason", "state", "spent", "events", "num_left_out"),
        *("_start", "_phase", "_since", "_reason", "_placement", "_admitted", "_started"),
        *("_received", "_worker", "_seen"),
    )

    def __init__(
        self, request: ev.Request, tenant_name: str, arrived_at: float, now: float
    ) -> None:
        self.number = request.id
        self.request_id = request.external_id
        self.tenant = request.tenant
        self.tenant_name = tenant_name
        self.arrived_at = arrived_at
        self.num_choices = request.num_choices
        self.num_prompt = len(request.prompt)
        self.num_cached = 0  # prompt tokens that the first worker found in its prefix cache
        self.num_tokens = 0  # generated tokens, which are set at the end of the request
        self.prefill_steps = 0  # steps that the first worker took for the prompt; 0 if unknown
        self.first_token = 0.0  # seconds from the arrival to the first token; 0 without a token
        self.seconds = 0.0  # seconds from the arrival to the end
        self.num_preemptions = 0
        self.num_failovers = 0
        self.num_migrations = 0
        self.num_bytes = 0  # KV bytes of all transfers
        self.finish_reason = ""
        self.state = Phase.QUEUED
        self.spent = [0.0] * len(Spent)
        self.events: list[ExplainedEvent] = []
        self.num_left_out = 0
        self._start = self._since = now
        self._phase = Spent.QUEUE
        self._reason = ""  # reason of the next submission
        self._placement: ExplainedEvent | None = None  # placement whose Submit was not sent yet
        # The last attempt that a worker added to its batch, and the worker's step count at that
        # time.
        self._admitted: tuple[int, int] | None = None
        self._started = 0  # last attempt that produced a token
        self._received = 0  # last attempt whose KV transfer is complete
        self._worker = ""  # worker that last ran the request
        # The last message that was handled. It may be about another request.
        self._seen: RequestMessage | None = None
        self._add("arrived", now, tokens=self.num_prompt)

    def elapsed(self, now: float) -> float:
        """Return the seconds from the arrival to `now`, or to the end of an ended request."""
        return self.seconds if self.finish_reason else now - self._start

    def times(self, now: float) -> list[float]:
        """Return the seconds in each phase of `Spent`; their sum is `elapsed`."""
        spent = list(self.spent)
        if not self.finish_reason:
            spent[self._phase] += now - self._since
        return spent

    def _add(
        self,
        kind: str,
        now: float,
        worker: str = "",
        other_worker: str = "",
        detail: str = "",
        tokens: int = 0,
        num_bytes: int = 0,
    ) -> None:
        self._append(
            ExplainedEvent(now - self._start, kind, worker, other_worker, detail, tokens, num_bytes)
        )

    def _append(self, event: ExplainedEvent) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
        else:
            self.num_left_out += 1

    def _enter(self, phase: Spent, now: float) -> None:
        self.spent[self._phase] += now - self._since
        self._phase, self._since = phase, now

    # -------------------------------------------------------------- decisions

    def placed(
        self,
        placement: Placement,
        candidates: Sequence[Candidate],
        num_workers: int,
        strategy: str,
        now: float,
    ) -> None:
        """Record the workers that the policy has chosen, and those that it compared."""
        decision = placement.decision
        detail = f"routing: {strategy}" if decision is None else str(decision)
        if decision is not None and (decision.disaggregated_seconds or decision.colocated_seconds):
            apart, together = decision.disaggregated_seconds, decision.colocated_seconds
            detail += f" (apart {apart * 1e3:.1f} ms, together {together * 1e3:.1f} ms)"
        self._placement = ExplainedEvent(
            now - self._start,
            "placed",
            placement.worker,
            placement.decode_target or "",
            detail,
            candidates=candidates,
            num_workers=num_workers,
        )

    def moving(self, reason: str) -> None:
        """Record why the request moves to another worker."""
        self._reason = reason
        self.num_migrations += 1

    def submitted(self, command: ev.Submit, now: float) -> ExplainedEvent:
        """Record that the request is sent to a worker; return the event with the reason."""
        source = "" if command.source is None else command.source.worker
        event, self._placement = self._placement, None
        if event is None or event.worker != command.worker:
            kept = 0 if command.source is None else command.source.kv_len
            reason = self._reason or ("planned" if source else "restarted")
            event = ExplainedEvent(
                now - self._start, "submitted", command.worker, source, reason, kept
            )
        elif self._reason or self._started:
            event = event._replace(detail=f"{self._reason or 'continued'}: {event.detail}")
        self._reason = ""
        self._append(event)
        return event

    # -------------------------------------------------------------- workers' messages

    def admitted(self, event: ev.Stepped, attempt: int, num_cached: int, now: float) -> None:
        """Record that a worker added the request to its batch, in the step of `event`."""
        steps = 0 if event.load is None else event.load.num_steps
        if self._admitted is not None and self._admitted[0] == attempt:
            self.num_preemptions += 1
            self._add("readmitted", now, event.worker, detail="it was preempted", tokens=num_cached)
            return
        if self._admitted is None:
            self.num_cached = num_cached
        self._admitted = attempt, steps
        self._add("admitted", now, event.worker, tokens=num_cached)
        if self._phase is Spent.PREFILL:
            step = 0.0 if event.load is None else event.load.last_step_seconds
            waited = max(now - step - self._since, 0.0)
            self.spent[Spent.WORKER_QUEUE] += waited
            self._since += waited

    def sent(self, command: ev.Send, now: float) -> None:
        """Record the start of a KV transfer."""
        self._add(
            "transfer_started",
            now,
            command.endpoint.worker,
            command.worker,
            detail=f"{command.have} tokens were there" if command.have else "",
            tokens=command.have,
        )

    def changed(self, state: RequestState, event: ev.Event | None, now: float) -> None:
        """Record the changes that `event` has made to the request."""
        if state.num_losses > self.num_failovers:
            self.num_failovers = state.num_losses
            self._reason = "its worker was lost"
            self._add("worker_lost", now, self._worker)
        running = state.running
        if running is not None:
            self._worker = running.worker
            if running.started and running.attempt != self._started:
                self._first_token(state, running.worker, event, now)
        # If the request is placed again immediately, this method runs several times for one event.
        # The event's message is recorded only once.
        if isinstance(event, RequestMessage) and event is not self._seen:
            self._add_message(event, now)
        phase = self._phase_of(state)
        if phase is not self._phase:
            self._enter(phase, now)

    def _first_token(
        self, state: RequestState, worker: str, event: ev.Event | None, now: float
    ) -> None:
        kind = "continued" if self._started else "first_token"
        if not self._started:
            self.first_token = now - self._start
            load = event.load if isinstance(event, ev.Stepped) else None
            if load is not None and self._admitted is not None and self._admitted[1]:
                self.prefill_steps = max(load.num_steps - self._admitted[1], 0) + 1
        assert state.running is not None
        self._started = state.running.attempt
        before = max(sum(map(len, state.token_log.answers)) - 1, 0)
        self._add(kind, now, worker, tokens=before)

    def _add_message(self, event: RequestMessage, now: float) -> None:
        self._seen = event
        if event.request != self.number:
            return
        match event:
            case ev.Yielded():
                self._add("yielded", now, event.worker, tokens=event.kv_len)
            case ev.Received():
                self._received = event.attempt
                self.num_bytes += event.num_bytes
                self._add("transfer_ended", now, event.worker, num_bytes=event.num_bytes)
            case ev.Failed():
                self._add("transfer_failed", now, event.worker, detail=_safe(event.reason))
            case ev.Rejected():
                self._reason = "a worker had no room"
                self._add("rejected", now, event.worker, detail=_safe(event.reason))

    def _phase_of(self, state: RequestState) -> Spent:
        self.state = phase_of(state)
        match self.state:
            case Phase.RUNNING:
                running = state.running
                assert running is not None
                if running.started or running.attempt == self._received:
                    return Spent.DECODE
                return Spent.RECOVERY if self._is_recovering else Spent.PREFILL
            case Phase.TRANSFERRING:
                return Spent.TRANSFER
            case Phase.QUEUED:
                return Spent.RECOVERY if self._is_recovering else Spent.QUEUE
        return Spent.WAIT

    @property
    def _is_recovering(self) -> bool:
        """Whether the request has lost a worker, or got its first token in an earlier attempt."""
        return bool(self._started or self.num_failovers)

    def end(self, finished: FinishedRequest, now: float) -> None:
        """Record the end of the request."""
        self._enter(self._phase, now)
        self.state = Phase.DONE
        self.seconds = finished.seconds
        self.num_tokens = finished.num_tokens
        self.finish_reason = finished.reason
        self._placement = self._seen = None
        self._add("ended", now, self._worker, detail=finished.reason, tokens=finished.num_tokens)


def _safe(reason: str) -> str:
    """Return the start of a worker's message if clients may see it, else a generic text."""
    return reason[:MAX_DETAIL] if is_client_safe(reason) else "see the server's log"
