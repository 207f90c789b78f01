"""The bounded queue of requests that wait for a worker: by priority, then fair between tenants.

Fairness uses virtual counters (start-time fair queueing over tokens, as in "Fairness in Serving
Large Language Models", arXiv 2401.00588). A tenant's counter increases with the prompt and answer
tokens of its requests, and the waiting tenant with the smallest counter is next. The counter of a
tenant that was idle is raised to the smallest counter of the waiting tenants, so that idle time
earns no credit. The requests of one tenant are ordered by arrival or, with a time-to-first-token
SLO, by `slo_order`.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from penstock.router.routing.queue.slo_order import PrefillCapacity, QueuedPrompt, select_next

PROMPT_WEIGHT = 1.0  # counter units per prompt token
OUTPUT_WEIGHT = 2.0  # counter units per generated token
MAX_TENANTS = 4096
"""Largest number of tenant counters; the next one replaces the counter idle for longest."""


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """The properties of a request that the queue uses."""

    request: int
    tenant: str
    priority: int
    num_tokens: int  # prompt tokens; added to the tenant's counter
    is_requeued: bool = False  # placed before: goes first, and max_queued does not count it
    arrived_at: float = 0.0  # clock seconds


class TenantQueue:
    """One tenant's queued requests of one priority; requeued requests go first."""

    __slots__ = ("new", "num_dequeued", "requeued")

    def __init__(self) -> None:
        self.requeued: OrderedDict[int, QueuedRequest] = OrderedDict()
        self.new: OrderedDict[int, QueuedRequest] = OrderedDict()
        self.num_dequeued = 0  # new requests taken from this queue so far

    def __bool__(self) -> bool:
        return bool(self.requeued or self.new)

    def add(self, entry: QueuedRequest) -> None:
        (self.requeued if entry.is_requeued else self.new)[entry.request] = entry

    def remove(self, entry: QueuedRequest) -> None:
        del (self.requeued if entry.is_requeued else self.new)[entry.request]

    def head(self) -> QueuedRequest:
        return next(iter((self.requeued or self.new).values()))

    def select(self, now: float, ttft_slo: float, capacity: PrefillCapacity) -> QueuedRequest:
        """Return the next request under a time-to-first-token SLO of `ttft_slo` seconds."""
        if self.requeued:
            return self.head()
        fresh = list(self.new.values())
        pace = capacity.seconds_per_token
        waits = [QueuedPrompt(each.arrived_at, each.num_tokens * pace) for each in fresh]
        return fresh[select_next(waits, now, ttft_slo, capacity.workers, self.num_dequeued)]


class DequeueRate:
    """Prompt tokens per second that leave the queue, averaged over about `WINDOW` seconds."""

    WINDOW = 10.0  # seconds
    ASSUMED = 1000.0
    """Tokens per second before the first measurement."""

    def __init__(self) -> None:
        self._tokens = 0.0  # exponentially decayed sum of tokens, at time `_at`
        self._since: float | None = None
        self._at = 0.0

    def add(self, num_tokens: int, now: float) -> None:
        if self._since is None:
            self._since = self._at = now
        self._tokens = self._decayed(now) + num_tokens
        self._at = now

    def value(self, now: float) -> float:
        if self._since is None or now <= self._since:
            return self.ASSUMED
        # Integral of the decay weights since `_since`; it approaches WINDOW.
        seconds = self.WINDOW * -math.expm1(-(now - self._since) / self.WINDOW)
        return max(self._decayed(now) / seconds, 1.0)

    def _decayed(self, now: float) -> float:
        return self._tokens * math.exp(-(now - self._at) / self.WINDOW)


class FairQueue:
    """A bounded queue of the requests that wait for a worker.

    Args:
        max_queued: largest number of requests that were never placed.
        max_queued_tokens: largest number of prompt tokens of these requests.
        ttft_slo: time-to-first-token SLO in seconds, see `slo_order`; 0: none.
    """

    MIN_RETRY, MAX_RETRY = 1.0, 60.0  # seconds

    def __init__(self, max_queued: int, max_queued_tokens: int, ttft_slo: float = 0.0) -> None:
        self._max_queued = max_queued
        self._ttft_slo = ttft_slo
        self._max_queued_tokens = max_queued_tokens
        self._entries: dict[int, QueuedRequest] = {}
        # Nonempty tenant queues, by priority and then by tenant.
        self._bands: dict[int, dict[str, TenantQueue]] = {}
        self._counters: OrderedDict[str, float] = OrderedDict()
        self._virtual_time = 0.0  # counter of the last dequeued tenant
        self._num_new = 0  # queued requests that were never placed; limited by max_queued
        self._num_tokens = 0  # prompt tokens of the requests in `_num_new`
        self._rate = DequeueRate()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: int) -> bool:
        return request in self._entries

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens of queued requests that were never placed."""
        return self._num_tokens

    def is_full(self, num_tokens: int) -> bool:
        """Return whether there is no room for a new prompt of `num_tokens` tokens."""
        if not self._num_new:
            return False
        return (
            self._num_new >= self._max_queued
            or self._num_tokens + num_tokens > self._max_queued_tokens
        )

    def retry_after(self, now: float) -> float:
        """Estimate the seconds until the queue is empty, within [MIN_RETRY, MAX_RETRY]."""
        seconds = self._num_tokens / self._rate.value(now)
        return min(max(seconds, self.MIN_RETRY), self.MAX_RETRY)

    def add(self, entry: QueuedRequest) -> None:
        """Add a request; for a new request the caller must have checked `is_full`."""
        assert entry.request not in self._entries
        self._activate(entry.tenant)
        self._entries[entry.request] = entry
        band = self._bands.setdefault(entry.priority, {})
        band.setdefault(entry.tenant, TenantQueue()).add(entry)
        if not entry.is_requeued:
            self._num_new += 1
            self._num_tokens += entry.num_tokens

    def head(self) -> int | None:
        """Return the next request, without regard to an SLO; None if the queue is empty."""
        line = self._next_queue()
        return line.head().request if line is not None else None

    def select(self, now: float, capacity: PrefillCapacity | None) -> int | None:
        """Return the next request to place, under the SLO if there is one.

        If `capacity` is None, no worker can start a prompt now. With an SLO, only requeued requests
        are then eligible, because their prompts may already be computed.
        """
        line = self._next_queue()
        if line is None or not self._ttft_slo:
            return self.head()
        if capacity is None:
            return line.head().request if line.requeued else None
        num_lines = len(self._bands[max(self._bands)])
        return line.select(now, self._ttft_slo, capacity.divided(num_lines)).request

    def _next_queue(self) -> TenantQueue | None:
        """Return the queue of the tenant that is next; None if no request is queued."""
        if not self._entries:
            return None
        band = self._bands[max(self._bands)]
        return band[min(band, key=self._counters.__getitem__)]

    def dequeue(self, request: int, now: float) -> None:
        """Remove a request that is placed; a new request's prompt is charged to its tenant."""
        entry = self._entries[request]
        self._bands[entry.priority][entry.tenant].num_dequeued += not entry.is_requeued
        self.remove(request)
        self._virtual_time = self._counters[entry.tenant]
        if not entry.is_requeued:
            self._counters[entry.tenant] += PROMPT_WEIGHT * entry.num_tokens
            self._rate.add(entry.num_tokens, now)

    def remove(self, request: int) -> None:
        """Remove a request if it is queued."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        band = self._bands[entry.priority]
        band[entry.tenant].remove(entry)
        if not band[entry.tenant]:
            del band[entry.tenant]
        if not band:
            del self._bands[entry.priority]
        if not entry.is_requeued:
            self._num_new -= 1
            self._num_tokens -= entry.num_tokens

    def charge_output(self, tenant: str, num_tokens: int) -> None:
        """Add the weight of generated tokens to a tenant's counter."""
        if tenant in self._counters:
            self._counters[tenant] += OUTPUT_WEIGHT * num_tokens

    def requests(self) -> list[int]:
        """Return the ids of all queued requests."""
        return list(self._entries)

    def _waiting(self) -> set[str]:
        return {tenant for band in self._bands.values() for tenant in band}

    def _activate(self, tenant: str) -> None:
        """Raise the counter of a tenant without queued requests to that of the next tenant."""
        if any(tenant in band for band in self._bands.values()):
            return
        waiting = [self._counters[other] for band in self._bands.values() for other in band]
        own = self._counters.pop(tenant, 0.0)
        self._counters[tenant] = max(own, min(waiting, default=self._virtual_time))
        if len(self._counters) > MAX_TENANTS:
            self._evict_idle_tenant()

    def _evict_idle_tenant(self) -> None:
        waiting = self._waiting()
        idle = next((name for name in self._counters if name not in waiting), None)
        if idle is not None and idle != next(reversed(self._counters)):
            del self._counters[idle]

    def check(self) -> None:
        """Assert that totals, entries and tenant queues agree."""
        lines = [line for band in self._bands.values() for line in band.values()]
        queued = [
            entry for line in lines for entry in (*line.requeued.values(), *line.new.values())
        ]
        assert all(lines), "an empty tenant queue is kept"
        assert {entry.request: entry for entry in queued} == self._entries
        fresh = [entry for entry in queued if not entry.is_requeued]
        assert self._num_new == len(fresh)
        assert self._num_tokens == sum(entry.num_tokens for entry in fresh)
        assert len(fresh) <= max(self._max_queued, 1), "more requests than the bound allows"
