"""Counters and histograms of a router's requests, as plain numbers."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.protos.serving.refused_connections import RefusedConnections
from penstock.router.routing import events as ev

# Upper bounds of histogram buckets, in seconds or tokens.
FIRST_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
TOKEN_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
REQUEST_BOUNDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
LENGTH_BOUNDS = tuple(float(2**power) for power in range(18))
COUNT_BOUNDS = tuple(float(2**power) for power in range(7))
PREEMPTION_BOUNDS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)  # vLLM's bounds, and 0
TRANSFER_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

REASONS: Mapping[ev.Status, str] = {
    ev.Status.CANCELLED: "cancelled",
    ev.Status.DEADLINE: "deadline",
    ev.Status.INVALID: "invalid",
    ev.Status.OVERLOADED: "overloaded",
    ev.Status.UNAVAILABLE: "unavailable",
    ev.Status.INTERNAL: "error",
}
OTHER_TENANT = "other"  # name that metrics use for tenants without a name


class Histogram:
    """A histogram of values.

    Args:
        bounds: inclusive upper bounds of the buckets, ascending. A last bucket has no bound.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self.total += value * count
        self.counts[bisect_left(self.bounds, value)] += count


class DeliveredTokens:
    """Number and times of the delivered tokens of one choice. `OpenRequests` records them."""

    __slots__ = ("finish", "first", "first_position", "last", "position")

    def __init__(self) -> None:
        self.first = 0.0  # time of the first delivery
        self.last: float | None = None  # time of the newest delivery, or None before the first
        # Token index of the first delivered token; above 0 if the choice was resumed.
        self.first_position = 0
        self.position = -1  # token index of the newest delivered token
        self.finish = 0  # finish reason of the newest token, a value of `Finish`

    @property
    def num_tokens(self) -> int:
        """Number of tokens delivered in this call."""
        return self.position + 1 - self.first_position


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not ended."""

    tenant_name: str  # name of the tenant in metrics
    request: ev.Request
    choices: Sequence[DeliveredTokens]
    arrived_at: float
    is_accepted: bool = False  # whether the queue has accepted the request
    submitted_at: float | None = None  # time of the first submission to a worker, or None
    # Time at which the first token was delivered, or None.
    first_token_at: float | None = None
    num_preemptions: int = 0  # number of preemptions in all attempts

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.choices)

    @property
    def reason(self) -> str:
        """The finish reason: "stop" or "length".

        A choice without a finish reason was ended by a stop string. A request without tokens had
        the parameter max_tokens=0.
        """
        finishes = {each.finish for each in self.choices if each.last is not None}
        return "stop" if finishes and ev.Finish.LENGTH not in finishes else "length"


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Summary of a request for the log. Times are in seconds since arrival."""

    request: ev.Request
    tenant: str  # name of the tenant in metrics
    reason: str
    num_tokens: int  # delivered tokens of all choices of the request
    queued: float | None  # seconds from arrival to submission; None if never submitted
    first_token: float | None
    seconds: float  # seconds from the arrival to the end of the request


class RequestMetrics:
    """Totals of one router since its start. Times are in seconds on a monotonic clock.

    Args:
        tenant_names: name of each tenant in metrics.
    """

    def __init__(self, tenant_names: Mapping[str, str]) -> None:
        self.finished = dict.fromkeys(("stop", "length", *REASONS.values()), 0)
        self.first_token = Histogram(FIRST_BOUNDS)
        # Seconds between the tokens of a choice, as one mean value per choice.
        self.per_token = Histogram(TOKEN_BOUNDS)
        self.between_tokens = Histogram(TOKEN_BOUNDS)
        self.num_delivered_tokens = 0  # tokens of all choices of all requests
        self.request = Histogram(REQUEST_BOUNDS)
        self.queue = Histogram(REQUEST_BOUNDS)  # seconds from the arrival to the first submission
        # Seconds from the first submission to the first token.
        self.prefill = Histogram(FIRST_BOUNDS)
        self.decode = Histogram(REQUEST_BOUNDS)  # seconds from the first token to the last
        # Seconds from the first submission to the last token.
        self.inference = Histogram(REQUEST_BOUNDS)
        self.prompt_lengths = Histogram(LENGTH_BOUNDS)
        self.answer_lengths = Histogram(LENGTH_BOUNDS)
        self.max_tokens = Histogram(LENGTH_BOUNDS)  # permitted length of each answer
        self.choices = Histogram(COUNT_BOUNDS)  # generated answers per request
        # Preemptions per ended request, over all its attempts and choices.
        self.preemptions = Histogram(PREEMPTION_BOUNDS)
        self.kv_transfer = Histogram(TRANSFER_BOUNDS)
        self.kv_transfer_bytes = 0
        self.malformed_requests = 0
        self.refused_connections = {
            port: RefusedConnections(port) for port in ("HTTP", "admin", "gRPC")
        }
        self._tenant_names = tenant_names
        # Number of prompt tokens of accepted requests, by tenant name.
        self.prompt_tokens_by_tenant = dict.fromkeys((*tenant_names.values(), OTHER_TENANT), 0)
        # Number of generated tokens of ended requests, by tenant name.
        self._generated_by_tenant = dict.fromkeys((*tenant_names.values(), OTHER_TENANT), 0)
        self._open_requests: dict[int, _OpenRequest] = {}
        # For each request number, the attempt and the start time of its KV transfer.
        self._transfers: dict[int, tuple[int, float]] = {}

    @property
    def prompt_tokens(self) -> int:
        """Total number of prompt tokens of all accepted requests."""
        return sum(self.prompt_tokens_by_tenant.values())

    def generated_by_tenant(self) -> dict[str, int]:
        """Return the number of generated tokens by tenant name; open requests count, too."""
        tokens = dict(self._generated_by_tenant)
        for one in self._open_requests.values():
            tokens[one.tenant_name] += one.num_tokens
        return tokens

    def malformed(self) -> None:
        """Count a request that is not valid HTTP."""
        self.malformed_requests += 1

    def opened(self, request: ev.Request, choices: Sequence[DeliveredTokens], now: float) -> None:
        """Record the arrival of a request, which the queue may still refuse.

        `choices` will count the delivered tokens of the request.
        """
        name = self._tenant_names.get(request.tenant, OTHER_TENANT)
        self._open_requests[request.id] = _OpenRequest(name, request, choices, now)

    def accepted(self, request: int) -> None:
        """Record that the queue has accepted a request; ignore a request that has ended."""
        one = self._open_requests.get(request)
        if one is not None:
            self._accept(one)

    def _accept(self, one: _OpenRequest) -> None:
        if not one.is_accepted:
            one.is_accepted = True
            self.prompt_tokens_by_tenant[one.tenant_name] += len(one.request.prompt)

    def submitted(self, command: ev.Submit, now: float) -> None:
        """Record that a request is submitted to a worker."""
        one = self._open_requests.get(command.request.id)
        if one is not None and one.submitted_at is None:
            one.submitted_at = now
            self.queue.add(now - one.arrived_at)

    def preempted(self, requests: Sequence[int]) -> None:
        """Record preemptions at a worker; `requests` has one entry for each preemption."""
        for request in requests:
            one = self._open_requests.get(request)
            if one is not None:
                one.num_preemptions += 1

    def first_token_delivered(self, request: int, now: float) -> None:
        """Record the first token of a choice, and its time if it is the request's first one."""
        self.num_delivered_tokens += 1
        one = self._open_requests[request]
        if one.first_token_at is None:
            one.first_token_at = now
            self.first_token.add(now - one.arrived_at)
            if one.submitted_at is not None:
                self.prefill.add(now - one.submitted_at)

    def later_tokens_delivered(self, counts: Mapping[float, int], now: float) -> None:
        """Record the delivery of tokens other than the first tokens of choices.

        A key of `counts` is the time at which the previous token of a choice was delivered. The
        value is the number of new tokens whose previous token was delivered at that time.
        """
        for last, number in counts.items():
            self.between_tokens.add(now - last, number)
            self.num_delivered_tokens += number

    def ended(self, request: int, status: ev.Status, now: float) -> FinishedRequest | None:
        """Record the end of a request; return its summary, or None if the request is unknown.

        A request that the queue has refused does not count as a finished request.
        """
        one = self._open_requests.pop(request, None)
        self._transfers.pop(request, None)
        if one is None:
            return None
        num_tokens, reason = one.num_tokens, REASONS.get(status) or one.reason
        self._generated_by_tenant[one.tenant_name] += num_tokens
        if one.is_accepted or status is not ev.Status.OVERLOADED:
            self.finished[reason] += 1
            self.preemptions.add(one.num_preemptions)
        if status is ev.Status.OK:
            self._accept(one)  # a resumed answer without further tokens ends when it arrives
            self._on_success(one, num_tokens, now)
        times = (one.submitted_at, one.first_token_at)
        queued, first = (None if at is None else at - one.arrived_at for at in times)
        return FinishedRequest(
            one.request, one.tenant_name, reason, num_tokens, queued, first, now - one.arrived_at
        )

    def _on_success(self, one: _OpenRequest, num_tokens: int, now: float) -> None:
        """Record the times and lengths of a complete answer."""
        self.request.add(now - one.arrived_at)
        self.prompt_lengths.add(len(one.request.prompt))
        self.answer_lengths.add(num_tokens)
        begun = [(each, each.last) for each in one.choices if each.last is not None]
        self.max_tokens.add(one.request.max_tokens)
        self.choices.add(one.request.num_choices)
        if one.first_token_at is not None:
            last_token_at = max(last for _, last in begun)
            self.decode.add(last_token_at - one.first_token_at)
            if one.submitted_at is not None:
                self.inference.add(last_token_at - one.submitted_at)
        for each, last in begun:
            if each.num_tokens > 1:
                self.per_token.add((last - each.first) / (each.num_tokens - 1))

    def sent(self, command: ev.Send, now: float) -> None:
        """Record the start of a KV transfer."""
        self._transfers[command.request] = (command.to_attempt, now)

    def received(self, event: ev.Received, now: float) -> None:
        """Record the completion of a KV transfer; ignore an event of an earlier attempt."""
        moving = self._transfers.get(event.request)
        if moving is not None and moving[0] == event.attempt:
            del self._transfers[event.request]
            self.kv_transfer.add(now - moving[1])
            self.kv_transfer_bytes += event.num_bytes
