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
HANDOVER_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

REASONS: Mapping[ev.Status, str] = {
    ev.Status.CANCELLED: "cancelled",
    ev.Status.DEADLINE: "deadline",
    ev.Status.INVALID: "invalid",
    ev.Status.OVERLOADED: "overloaded",
    ev.Status.UNAVAILABLE: "unavailable",
    ev.Status.INTERNAL: "error",
}
OTHER = "other"  # a tenant that has no name


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

    def add(self, value: float, number: int = 1) -> None:
        self.total += value * number
        self.counts[bisect_left(self.bounds, value)] += number


@dataclass(slots=True)
class _Stretch:
    """The tokens of one choice so far."""

    first: float  # when
    last: float
    newest: ev.Deliver
    begin: int  # position of its first token: what a client brings along was made elsewhere

    @property
    def num_tokens(self) -> int:
        return self.newest.position + len(self.newest.tokens) - self.begin


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    name: str  # of its tenant
    request: ev.Request
    since: float
    submitted: float | None = None  # when it first went to a worker
    first: float | None = None  # when its first token came
    stretches: dict[int, _Stretch] = field(default_factory=dict)  # by choice

    @property
    def num_tokens(self) -> int:
        return sum(stretch.num_tokens for stretch in self.stretches.values())

    @property
    def reason(self) -> str:
        """How its answer ended: what did so without saying how was cut at a stop string, and one
        without tokens was to have none."""
        finishes = {stretch.newest.finish for stretch in self.stretches.values()}
        return "stop" if finishes and ev.Finish.LENGTH not in finishes else "length"


@dataclass(frozen=True, slots=True)
class Ended:
    """How one request went, for the log. Times are in seconds since its arrival."""

    request: ev.Request
    tenant: str  # as it is called where others can read it
    reason: str
    num_tokens: int  # of its answer
    queued: float | None  # until it first went to a worker; None: it never did
    first_token: float | None
    seconds: float  # until its end


class Tally:
    """Totals since the start, of one router. Times are in seconds, on any clock that never goes
    back.

    Args:
        names: what the tenants are called where others can read it.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
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
        self.handover = Histogram(HANDOVER_BOUNDS)
        self.handover_bytes = 0
        self._names = names
        # Prompt tokens of requests that were taken, by the name of who asked.
        self.asked = dict.fromkeys((*names.values(), OTHER), 0)
        self._tokens = dict.fromkeys((*names.values(), OTHER), 0)  # of ended requests
        self._open: dict[int, _Open] = {}
        self._moving: dict[int, tuple[int, float]] = {}  # a request: its attempt, and since when

    @property
    def prompt_tokens(self) -> int:
        """Of all requests that were taken."""
        return sum(self.asked.values())

    def generated(self) -> dict[str, int]:
        """Tokens by the name of who asked, those of open requests included."""
        tokens = dict(self._tokens)
        for one in self._open.values():
            tokens[one.name] += one.num_tokens
        return tokens

    def opened(self, request: ev.Request, now: float) -> None:
        """A client's request was taken."""
        name = self._names.get(request.tenant, OTHER)
        self._open[request.id] = _Open(name, request, now)
        self.asked[name] += len(request.prompt)

    def submitted(self, command: ev.Submit, now: float) -> None:
        """A request goes to a worker."""
        one = self._open.get(command.request.id)
        if one is not None and one.submitted is None:
            one.submitted = now
            self.queue.add(now - one.since)

    def delivered(self, commands: Iterable[ev.Command], now: float) -> None:
        """What one event gave to clients. There is one a token, so it is made to be quick."""
        gaps: list[float] = []
        for command in commands:
            if type(command) is not ev.Deliver or not command.tokens:
                continue
            one = self._open.get(command.request)
            if one is None:
                continue
            stretch = one.stretches.get(command.choice)
            if stretch is None:
                if one.first is None:
                    self._begun(one, now)
                one.stretches[command.choice] = _Stretch(now, now, command, command.position)
            else:
                gaps.append(now - stretch.last)
                stretch.last = now
                stretch.newest = command
        # The tokens of a step mostly follow on those of the step before: few gaps, many of each.
        for gap, number in Counter(gaps).items():
            self.between_tokens.add(gap, number)

    def _begun(self, one: _Open, now: float) -> None:
        one.first = now
        self.first_token.add(now - one.since)
        if one.submitted is not None:
            self.prefill.add(now - one.submitted)

    def ended(self, request: int, status: ev.Status, now: float) -> Ended | None:
        """A request is over; unknown: nothing."""
        one = self._open.pop(request, None)
        self._moving.pop(request, None)
        if one is None:
            return None
        num_tokens, reason = one.num_tokens, REASONS.get(status) or one.reason
        self._tokens[one.name] += num_tokens
        self.finished[reason] += 1
        if status is ev.Status.OK:
            self._served(one, num_tokens, now)
        times = (one.submitted, one.first)
        queued, first = (None if at is None else at - one.since for at in times)
        return Ended(one.request, one.name, reason, num_tokens, queued, first, now - one.since)

    def _served(self, one: _Open, num_tokens: int, now: float) -> None:
        """An answer is whole."""
        self.request.add(now - one.since)
        self.prompt_lengths.add(len(one.request.prompt))
        self.answer_lengths.add(num_tokens)
        if one.first is not None:
            self.decode.add(max(stretch.last for stretch in one.stretches.values()) - one.first)
        for stretch in one.stretches.values():
            if stretch.num_tokens > 1:
                self.per_token.add((stretch.last - stretch.first) / (stretch.num_tokens - 1))

    def sent(self, command: ev.Send, now: float) -> None:
        """Blocks of a request are asked to move."""
        self._moving[command.request] = (command.to_attempt, now)

    def received(self, event: ev.Received, now: float) -> None:
        """They have arrived; of a transfer that is no longer known: nothing."""
        moving = self._moving.get(event.request)
        if moving is not None and moving[0] == event.attempt:
            del self._moving[event.request]
            self.handover.add(now - moving[1])
            self.handover_bytes += event.num_bytes
