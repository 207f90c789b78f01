"""What a router counts and times of its requests: plain numbers."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.router.routing import events as ev

FIRST_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
TOKEN_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
REQUEST_BOUNDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
LENGTH_BOUNDS = tuple(float(2**power) for power in range(18))
TRANSFER_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

REASONS: Mapping[ev.Status, str] = {
    ev.Status.CANCELLED: "cancelled",
    ev.Status.DEADLINE: "deadline",
    ev.Status.INVALID: "invalid",
    ev.Status.OVERLOADED: "overloaded",
    ev.Status.UNAVAILABLE: "unavailable",
    ev.Status.INTERNAL: "error",
}
OTHER_TENANT = "other"  # a tenant that has no name


class Histogram:
    """Counts of values by size.

    Args:
        bounds: rising; a value counts under the first that it does not pass, or past the last.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self.total += value * count
        self.counts[bisect_left(self.bounds, value)] += count


@dataclass(slots=True)
class _ChoiceTimer:
    """The tokens of one choice so far."""

    first: float  # when
    last: float
    newest: ev.Deliver
    first_position: int  # of its first token here; a resumed stream brings earlier ones along

    @property
    def num_tokens(self) -> int:
        return self.newest.position + len(self.newest.tokens) - self.first_position


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not ended."""

    tenant_name: str  # of its tenant
    request: ev.Request
    arrived_at: float
    submitted_at: float | None = None  # when it first went to a worker
    first_token_at: float | None = None  # when its first token came
    timers: dict[int, _ChoiceTimer] = field(default_factory=dict)  # by choice

    @property
    def num_tokens(self) -> int:
        return sum(stretch.num_tokens for stretch in self.timers.values())

    @property
    def reason(self) -> str:
        """How its answer ended: what did so without saying how was cut at a stop string, and one
        without tokens was to have none."""
        finishes = {stretch.newest.finish for stretch in self.timers.values()}
        return "stop" if finishes and ev.Finish.LENGTH not in finishes else "length"


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """How one request went, for the log. Times are in seconds since its arrival."""

    request: ev.Request
    tenant: str  # as it is called where others can read it
    reason: str
    num_tokens: int  # of its answer
    queued: float | None  # until it first went to a worker; None: it never did
    first_token: float | None
    seconds: float  # until its end


class RequestMetrics:
    """Totals since the start, of one router. Times are in seconds, on any clock that never goes
    back.

    Args:
        names: what the tenants are called where others can read it.
    """

    def __init__(self, tenant_names: Mapping[str, str]) -> None:
        self.finished = dict.fromkeys(("stop", "length", *REASONS.values()), 0)
        self.first_token = Histogram(FIRST_BOUNDS)
        self.per_token = Histogram(TOKEN_BOUNDS)  # of an answer: mean after its first
        self.between_tokens = Histogram(TOKEN_BOUNDS)
        self.request = Histogram(REQUEST_BOUNDS)
        self.queue = Histogram(REQUEST_BOUNDS)  # until a request first goes to a worker
        self.prefill = Histogram(FIRST_BOUNDS)  # from there to its first token
        self.decode = Histogram(REQUEST_BOUNDS)  # from there to its last
        self.prompt_lengths = Histogram(LENGTH_BOUNDS)
        self.answer_lengths = Histogram(LENGTH_BOUNDS)
        self.kv_transfer = Histogram(TRANSFER_BOUNDS)
        self.kv_transfer_bytes = 0
        self._tenant_names = tenant_names
        # Prompt tokens of requests that were taken, by the name of who asked.
        self.prompt_tokens_by_tenant = dict.fromkeys((*tenant_names.values(), OTHER_TENANT), 0)
        self._generated_by_tenant = dict.fromkeys(
            (*tenant_names.values(), OTHER_TENANT), 0
        )  # of ended requests
        self._open_requests: dict[int, _OpenRequest] = {}
        self._transfers: dict[int, tuple[int, float]] = {}  # a request: its attempt, and since when

    @property
    def prompt_tokens(self) -> int:
        """Of all requests that were taken."""
        return sum(self.prompt_tokens_by_tenant.values())

    def generated_by_tenant(self) -> dict[str, int]:
        """Tokens by the name of who asked, those of open requests included."""
        tokens = dict(self._generated_by_tenant)
        for one in self._open_requests.values():
            tokens[one.tenant_name] += one.num_tokens
        return tokens

    def opened(self, request: ev.Request, now: float) -> None:
        """A client's request was taken."""
        name = self._tenant_names.get(request.tenant, OTHER_TENANT)
        self._open_requests[request.id] = _OpenRequest(name, request, now)
        self.prompt_tokens_by_tenant[name] += len(request.prompt)

    def submitted(self, command: ev.Submit, now: float) -> None:
        """A request goes to a worker."""
        one = self._open_requests.get(command.request.id)
        if one is not None and one.submitted_at is None:
            one.submitted_at = now
            self.queue.add(now - one.arrived_at)

    def delivered(self, commands: Iterable[ev.Command], now: float) -> None:
        """What one event gave to clients. There is one a token, so it is made to be quick."""
        gaps: list[float] = []
        for command in commands:
            if type(command) is not ev.Deliver or not command.tokens:
                continue
            one = self._open_requests.get(command.request)
            if one is None:
                continue
            stretch = one.timers.get(command.choice)
            if stretch is None:
                if one.first_token_at is None:
                    self._on_first_token(one, now)
                one.timers[command.choice] = _ChoiceTimer(now, now, command, command.position)
            else:
                gaps.append(now - stretch.last)
                stretch.last = now
                stretch.newest = command
        # The tokens of a step mostly follow on those of the step before: few gaps, many of each.
        for gap, number in Counter(gaps).items():
            self.between_tokens.add(gap, number)

    def _on_first_token(self, one: _OpenRequest, now: float) -> None:
        one.first_token_at = now
        self.first_token.add(now - one.arrived_at)
        if one.submitted_at is not None:
            self.prefill.add(now - one.submitted_at)

    def ended(self, request: int, status: ev.Status, now: float) -> FinishedRequest | None:
        """A request is over; unknown: nothing."""
        one = self._open_requests.pop(request, None)
        self._transfers.pop(request, None)
        if one is None:
            return None
        num_tokens, reason = one.num_tokens, REASONS.get(status) or one.reason
        self._generated_by_tenant[one.tenant_name] += num_tokens
        self.finished[reason] += 1
        if status is ev.Status.OK:
            self._on_success(one, num_tokens, now)
        times = (one.submitted_at, one.first_token_at)
        queued, first = (None if at is None else at - one.arrived_at for at in times)
        return FinishedRequest(
            one.request, one.tenant_name, reason, num_tokens, queued, first, now - one.arrived_at
        )

    def _on_success(self, one: _OpenRequest, num_tokens: int, now: float) -> None:
        """An answer is whole."""
        self.request.add(now - one.arrived_at)
        self.prompt_lengths.add(len(one.request.prompt))
        self.answer_lengths.add(num_tokens)
        if one.first_token_at is not None:
            self.decode.add(
                max(stretch.last for stretch in one.timers.values()) - one.first_token_at
            )
        for stretch in one.timers.values():
            if stretch.num_tokens > 1:
                self.per_token.add((stretch.last - stretch.first) / (stretch.num_tokens - 1))

    def sent(self, command: ev.Send, now: float) -> None:
        """Blocks of a request are asked to move."""
        self._transfers[command.request] = (command.to_attempt, now)

    def received(self, event: ev.Received, now: float) -> None:
        """They have arrived; of a transfer that is no longer known: nothing."""
        moving = self._transfers.get(event.request)
        if moving is not None and moving[0] == event.attempt:
            del self._transfers[event.request]
            self.kv_transfer.add(now - moving[1])
            self.kv_transfer_bytes += event.num_bytes
