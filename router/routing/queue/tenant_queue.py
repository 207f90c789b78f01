"""The queued requests of one tenant, and their order."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.router.routing.queue.slo_order import PrefillCapacity, select_next


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """The properties of a request that the queue uses."""

    request: int
    tenant: str
    priority: int  # as in vLLM, a tenant's requests with lower values go first
    num_tokens: int  # prompt tokens, which are added to the tenant's counter
    is_requeued: bool = False  # was placed before, so it comes first and the bounds ignore it
    arrived_at: float = 0.0  # time of arrival, in seconds of the router's monotonic clock
    cost: int = 0  # upper bound of the prompt and answer tokens of all sequences


class TenantQueue:
    """One tenant's queued requests: requeued requests first, then by priority and arrival."""

    __slots__ = ("_new", "num_dequeued", "requeued")

    def __init__(self) -> None:
        self.requeued: OrderedDict[int, QueuedRequest] = OrderedDict()
        # Requests that were never placed, by priority; priorities without requests are removed.
        self._new: dict[int, OrderedDict[int, QueuedRequest]] = {}
        self.num_dequeued = 0  # number of new requests that were taken from this queue

    def __bool__(self) -> bool:
        return bool(self.requeued or self._new)

    def __iter__(self) -> Iterator[QueuedRequest]:
        yield from self.requeued.values()
        for line in self._new.values():
            yield from line.values()

    def last_first(self) -> Iterator[QueuedRequest]:
        """Yield the requests that were never placed, in the reverse of their order."""
        for priority in sorted(self._new, reverse=True):
            yield from reversed(self._new[priority].values())

    def cost_ahead(self, priority: int) -> int:
        """Return the total cost of the new requests that precede a new one of this priority."""
        ahead = [line.values() for known, line in self._new.items() if known <= priority]
        return sum(entry.cost for line in ahead for entry in line)

    def add(self, entry: QueuedRequest) -> None:
        if entry.is_requeued:
            self.requeued[entry.request] = entry
        else:
            self._new.setdefault(entry.priority, OrderedDict())[entry.request] = entry

    def remove(self, entry: QueuedRequest) -> None:
        if entry.is_requeued:
            del self.requeued[entry.request]
            return
        line = self._new[entry.priority]
        del line[entry.request]
        if not line:
            del self._new[entry.priority]

    def head(self) -> QueuedRequest:
        return next(iter((self.requeued or self._first_line()).values()))

    def select(self, now: float, ttft_slo: float, capacity: PrefillCapacity) -> QueuedRequest:
        """Return the next request under the time-to-first-token SLO `ttft_slo` (seconds)."""
        if self.requeued:
            return self.head()
        fresh = list(self._first_line().values())
        arrived_at = [each.arrived_at for each in fresh]
        num_tokens = [each.num_tokens for each in fresh]
        chosen = select_next(arrived_at, num_tokens, now, ttft_slo, capacity, self.num_dequeued)
        return fresh[chosen]

    def _first_line(self) -> OrderedDict[int, QueuedRequest]:
        return self._new[min(self._new)]
