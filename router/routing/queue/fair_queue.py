"""The bounded queue of requests that wait for a worker, fair between tenants.

Fairness uses virtual counters (start-time fair queueing over tokens, as in "Fairness in Serving
Large Language Models", arXiv 2401.00588). A tenant's counter increases with the prompt and answer
tokens of its requests. The waiting tenant with the smallest counter is next. When an idle tenant
queues a request, its counter is raised to the smallest counter of the waiting tenants, so that idle
time earns no credit.

A priority orders the requests of one tenant and has no effect on other tenants. Requests of equal
priority are ordered by arrival or, with a time-to-first-token SLO, by `slo_order`. `tenant_quotas`
decides which new requests the queue accepts.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator

from penstock.router.routing.queue.dequeue_rate import DequeueRate
from penstock.router.routing.queue.slo_order import PrefillCapacity
from penstock.router.routing.queue.tenant_queue import QueuedRequest, TenantQueue
from penstock.router.routing.queue.tenant_quotas import Amount, TenantQuotas

PROMPT_WEIGHT = 1.0  # counter units per prompt token
OUTPUT_WEIGHT = 2.0  # counter units per generated token
MAX_TENANTS = 4096
"""Largest number of tenant counters; a new counter replaces the one that is idle for longest."""


class FairQueue:
    """A bounded queue of the requests that wait for a worker.

    Args:
        bounds: largest amount of the requests that were never placed.
        ttft_slo: time-to-first-token SLO in seconds (see `slo_order`); 0 means no SLO.
        max_wait: longest wait of a request before it is first placed, in seconds.
    """

    MIN_RETRY, MAX_RETRY = 1.0, 60.0  # seconds

    def __init__(self, bounds: Amount, ttft_slo: float = 0.0, max_wait: float = math.inf) -> None:
        self.max_wait = max_wait
        self._ttft_slo = ttft_slo
        self._quotas = TenantQuotas(bounds)
        self._entries: dict[int, QueuedRequest] = {}
        self._queues: dict[str, TenantQueue] = {}  # non-empty queue of each waiting tenant
        self._counters: OrderedDict[str, float] = OrderedDict()
        self._virtual_time = 0.0  # counter of the tenant whose request was dequeued last
        self._rate = DequeueRate()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: int) -> bool:
        return request in self._entries

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens of queued requests that were never placed."""
        return self._quotas.total.tokens

    def displaced_by(self, entry: QueuedRequest) -> list[int] | None:
        """Return the requests to remove so that a new one fits, or None to refuse the new one."""
        displaced = self._quotas.displaced_by(entry, self._last_first)
        return None if displaced is None else [each.request for each in displaced]

    def _last_first(self, tenant: str) -> Iterator[QueuedRequest]:
        return self._queues[tenant].last_first()

    def retry_after(self, entry: QueuedRequest, now: float) -> float:
        """Return the seconds after which the client of a refused request should retry.

        This is the time in which the request and the waiting requests of its tenant would be
        placed. The result is within [MIN_RETRY, MAX_RETRY].
        """
        held = self._quotas.by_tenant.get(entry.tenant, Amount()).cost
        own = held if entry.request in self._entries else held + entry.cost
        seconds = self._quotas.cost_before(entry.tenant, own) / self._rate.value(now)
        return min(max(seconds, self.MIN_RETRY), self.MAX_RETRY)

    def predicted_wait(self, entry: QueuedRequest) -> float:
        """Estimate the seconds for which a new request would wait; 0 if the speed is unknown.

        The speed is that of the latest placements. It is used even if no requests are placed now,
        because workers may still be starting.
        """
        speed = self._rate.last_measured
        if not self._quotas.total.requests or not speed:
            return 0.0
        queue = self._queues.get(entry.tenant)
        ahead = queue.cost_ahead(entry.priority) if queue is not None else 0
        through = self._quotas.cost_before(entry.tenant, ahead + entry.cost)
        return (through - entry.cost) / speed

    def has_waited_too_long(self, request: int, now: float) -> bool:
        """Return whether a request has waited longer than `max_wait`.

        The result is False for a requeued request.
        """
        entry = self._entries[request]
        return not entry.is_requeued and now - entry.arrived_at > self.max_wait

    def add(self, entry: QueuedRequest) -> None:
        """Add a request.

        For a new request, the caller must first remove the requests that `displaced_by` returns.
        """
        assert entry.request not in self._entries
        self._activate(entry.tenant)
        self._entries[entry.request] = entry
        self._queues.setdefault(entry.tenant, TenantQueue()).add(entry)
        if not entry.is_requeued:
            self._quotas.add(entry)
            self._rate.began_to_wait(entry.arrived_at)

    def head(self) -> int | None:
        """Return the next request without regard to an SLO, or None if the queue is empty."""
        queue = self._next_queue()
        return queue.head().request if queue is not None else None

    def select(self, now: float, capacity: PrefillCapacity | None) -> int | None:
        """Return the next request to place, under the SLO if there is one.

        If `capacity` is None, no worker can start a prompt now. With an SLO, only requeued requests
        are then eligible, because their prompts may already be computed.
        """
        queue = self._next_queue()
        if queue is None or not self._ttft_slo:
            return self.head()
        if capacity is None:
            return queue.head().request if queue.requeued else None
        return queue.select(now, self._ttft_slo, capacity.divided(len(self._queues))).request

    def _next_queue(self) -> TenantQueue | None:
        """Return the queue of the tenant that is next, or None if no request is queued."""
        if not self._queues:
            return None
        return self._queues[min(self._queues, key=self._counters.__getitem__)]

    def dequeue(self, request: int, now: float) -> None:
        """Remove a request that is placed. The prompt of a new request is charged to its tenant."""
        entry = self._entries[request]
        if not entry.is_requeued:
            self._queues[entry.tenant].num_dequeued += 1
            self._rate.add(entry.cost, entry.arrived_at, now)
        self.remove(request)
        self._virtual_time = self._counters[entry.tenant]
        if not entry.is_requeued:
            self._counters[entry.tenant] += PROMPT_WEIGHT * entry.num_tokens

    def remove(self, request: int) -> None:
        """Remove a request if it is queued."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        queue = self._queues[entry.tenant]
        queue.remove(entry)
        if not queue:
            del self._queues[entry.tenant]
        if not entry.is_requeued:
            self._quotas.remove(entry)
            if not self._quotas.total.requests:
                self._rate.emptied()

    def charge_output(self, tenant: str, num_tokens: int) -> None:
        """Add the weight of generated tokens to a tenant's counter."""
        if tenant in self._counters:
            self._counters[tenant] += OUTPUT_WEIGHT * num_tokens

    def _activate(self, tenant: str) -> None:
        """Raise the counter of a newly waiting tenant to the smallest counter of the others."""
        if tenant in self._queues:
            return
        waiting = [self._counters[other] for other in self._queues]
        own = self._counters.pop(tenant, 0.0)
        self._counters[tenant] = max(own, min(waiting, default=self._virtual_time))
        if len(self._counters) > MAX_TENANTS:
            self._evict_idle_tenant()

    def _evict_idle_tenant(self) -> None:
        idle = next((name for name in self._counters if name not in self._queues), None)
        if idle is not None and idle != next(reversed(self._counters)):
            del self._counters[idle]

    def check(self) -> None:
        """Assert that totals, entries and tenant queues agree."""
        queued = [entry for queue in self._queues.values() for entry in queue]
        assert all(self._queues.values()), "an empty tenant queue is kept"
        assert {entry.request: entry for entry in queued} == self._entries
        self._quotas.check(queued)
