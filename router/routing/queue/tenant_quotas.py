"""Each tenant's share of the queue's bounds, and the rules by which new requests displace others.

A tenant's share is the largest of its shares of the three bounds: requests, prompt tokens and cost
(as in "Dominant Resource Fairness", NSDI 2011). Only requests that were never placed count. With n
tenants waiting, the rules for a new request are:

- A tenant that already waits may hold at most the fraction `LARGEST_FRACTION` or 1/n of each bound,
  whichever is larger. For a single tenant this is the whole queue.
- If the queue is full, the new request displaces the last requests of the tenant with the largest
  share. This share must be larger than the share that the new request's tenant would have.
- The new request is refused if these displacements do not make room.

Therefore a request is never refused if its tenant would hold at most 1/n of each bound.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from penstock.router.routing.queue.tenant_queue import QueuedRequest

LARGEST_FRACTION = 0.25
"""Fraction of each bound that one tenant may hold, however many tenants wait."""


class Amount(NamedTuple):
    """An amount of requests: their number, their prompt tokens, and their total cost."""

    requests: int = 0
    tokens: int = 0
    cost: int = 0

    def plus(self, entry: QueuedRequest) -> "Amount":
        return Amount(self.requests + 1, self.tokens + entry.num_tokens, self.cost + entry.cost)

    def minus(self, entry: QueuedRequest) -> "Amount":
        return Amount(self.requests - 1, self.tokens - entry.num_tokens, self.cost - entry.cost)

    def fraction_of(self, bounds: "Amount") -> float:
        """Return the largest of the three fractions of the bounds that this amount takes."""
        return max(
            self.requests / bounds.requests, self.tokens / bounds.tokens, self.cost / bounds.cost
        )


def amount_of(entries: Iterable[QueuedRequest]) -> Amount:
    """Return the amount of the entries that were never placed."""
    total = Amount()
    for entry in entries:
        if not entry.is_requeued:
            total = total.plus(entry)
    return total


class TenantQuotas:
    """Amounts of the queued requests that were never placed, in total and by tenant."""

    def __init__(self, bounds: Amount) -> None:
        self._bounds = bounds
        self.total = Amount()
        self.by_tenant: dict[str, Amount] = {}  # only tenants that have such requests

    def add(self, entry: QueuedRequest) -> None:
        self.total = self.total.plus(entry)
        self.by_tenant[entry.tenant] = self.by_tenant.get(entry.tenant, Amount()).plus(entry)

    def remove(self, entry: QueuedRequest) -> None:
        self.total = self.total.minus(entry)
        held = self.by_tenant[entry.tenant].minus(entry)
        if held.requests:
            self.by_tenant[entry.tenant] = held
        else:
            del self.by_tenant[entry.tenant]

    def cost_before(self, tenant: str, own: int) -> int:
        """Return the cost that is served in total until a tenant has been served the cost `own`.

        The tenants with waiting requests are assumed to be served at the same speed.
        """
        others = self._others(tenant).values()
        return own + sum(min(held.cost, own) for held in others)

    def displaced_by(
        self,
        entry: QueuedRequest,
        last_first: Callable[[str], Iterator[QueuedRequest]],
    ) -> list[QueuedRequest] | None:
        """Return the requests to displace so that a new one fits, or None to refuse the new one.

        Args:
            entry: the new request.
            last_first: yields the requests of a tenant that were never placed, the last one first.
        """
        if not self.total.requests:
            return []  # an empty queue accepts a request of any size
        held = self.by_tenant.get(entry.tenant)
        fraction = (held or Amount()).plus(entry).fraction_of(self._bounds)
        if held is not None and fraction > self._limit():
            return None
        total = self.total.plus(entry)
        if total.fraction_of(self._bounds) <= 1:
            return []
        return self._choose(total, fraction, self._others(entry.tenant), last_first)

    def _limit(self) -> float:
        """Return the largest share of the bounds that a waiting tenant may hold."""
        return max(LARGEST_FRACTION, 1 / len(self.by_tenant))

    def _others(self, tenant: str) -> Mapping[str, Amount]:
        return {name: held for name, held in self.by_tenant.items() if name != tenant}

    def _choose(
        self,
        total: Amount,
        fraction: float,
        others: Mapping[str, Amount],
        last_first: Callable[[str], Iterator[QueuedRequest]],
    ) -> list[QueuedRequest] | None:
        """Choose requests to displace until `total` is within the bounds.

        Only requests of tenants whose share is above `fraction` are chosen.
        """
        largest = [(-held.fraction_of(self._bounds), name, held) for name, held in others.items()]
        heapq.heapify(largest)
        sources: dict[str, Iterator[QueuedRequest]] = {}
        chosen: list[QueuedRequest] = []
        while total.fraction_of(self._bounds) > 1:
            if not largest or -largest[0][0] <= fraction:
                return None
            _, name, held = largest[0]
            victim = next(sources.setdefault(name, last_first(name)))
            chosen.append(victim)
            total, held = total.minus(victim), held.minus(victim)
            heapq.heapreplace(largest, (-held.fraction_of(self._bounds), name, held))
        return chosen

    def check(self, entries: Iterable[QueuedRequest]) -> None:
        """Assert that the amounts are those of the entries of the queue."""
        fresh = [entry for entry in entries if not entry.is_requeued]
        tenants = {entry.tenant for entry in fresh}
        assert self.by_tenant == {
            tenant: amount_of(entry for entry in fresh if entry.tenant == tenant)
            for tenant in tenants
        }
        assert self.total == amount_of(fresh)
        assert len(fresh) <= 1 or self.total.fraction_of(self._bounds) <= 1, (
            "the queue contains more than its bounds allow"
        )
