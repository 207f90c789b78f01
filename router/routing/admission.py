"""The line before the workers: bounded, fair between tenants, in bands of priority.

Fairness is by virtual counters (start-time fair queueing over tokens, as in "Fairness in Serving
Large Language Models", arXiv 2401.00588): a tenant's counter grows with the service it gets, the
waiting tenant with the smallest counter is next, and one that comes back from idleness starts from
the smallest counter of those that are waiting, so that nobody saves up service.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
MAX_TENANTS = 4096
"""Counters kept; those of the longest idle tenants are forgotten beyond it."""


@dataclass(frozen=True, slots=True)
class Entry:
    request: int
    tenant: str
    priority: int
    num_tokens: (
        int  # of the prompt: what it weighs in the queue's bound and in its tenant's counter
    )
    again: bool = False  # it was placed before: ahead of its tenant's line, outside the bound


class Line:
    """One tenant's requests in one band, in order: first those that were placed before."""

    __slots__ = ("again", "fresh")

    def __init__(self) -> None:
        self.again: OrderedDict[int, Entry] = OrderedDict()
        self.fresh: OrderedDict[int, Entry] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self.again or self.fresh)

    def add(self, entry: Entry) -> None:
        (self.again if entry.again else self.fresh)[entry.request] = entry

    def remove(self, entry: Entry) -> None:
        del (self.again if entry.again else self.fresh)[entry.request]

    def head(self) -> Entry:
        return next(iter((self.again or self.fresh).values()))


class DrainRate:
    """Prompt tokens a second that leave the queue, over about the last ten seconds."""

    WINDOW = 10.0
    ASSUMED = 1000.0
    """Before anything was measured."""

    def __init__(self) -> None:
        self._tokens = 0.0  # decayed to `_at`
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
        # A window that is not full yet is divided by what has passed of it.
        seconds = self.WINDOW * -math.expm1(-(now - self._since) / self.WINDOW)
        return max(self._decayed(now) / seconds, 1.0)

    def _decayed(self, now: float) -> float:
        return self._tokens * math.exp(-(now - self._at) / self.WINDOW)


class Admission:
    """Requests that wait for a worker."""

    MIN_RETRY, MAX_RETRY = 1.0, 60.0

    def __init__(self, max_queued: int, max_queued_tokens: int) -> None:
        self._max_queued = max_queued
        self._max_queued_tokens = max_queued_tokens
        self._entries: dict[int, Entry] = {}
        self._bands: dict[int, dict[str, Line]] = {}  # a priority, a tenant: its line if not empty
        self._counters: OrderedDict[str, float] = OrderedDict()
        self._floor = 0.0  # the counter that was served last
        self._num_bounded = 0  # entries that count against the bound, and their tokens
        self._num_tokens = 0
        self._rate = DrainRate()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: int) -> bool:
        return request in self._entries

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of the requests that wait for their first worker."""
        return self._num_tokens

    def is_full(self, num_tokens: int) -> bool:
        """Whether a request with so long a prompt is too much now."""
        if not self._num_bounded:
            return False
        return (
            self._num_bounded >= self._max_queued
            or self._num_tokens + num_tokens > self._max_queued_tokens
        )

    def retry_after(self, now: float) -> float:
        """Seconds until the backlog will have been worked off, at the rate of late."""
        seconds = self._num_tokens / self._rate.value(now)
        return min(max(seconds, self.MIN_RETRY), self.MAX_RETRY)

    def add(self, entry: Entry) -> None:
        """Put it in its line. The bound is the caller's to ask for (`is_full`)."""
        assert entry.request not in self._entries
        self._lift(entry.tenant)
        self._entries[entry.request] = entry
        band = self._bands.setdefault(entry.priority, {})
        band.setdefault(entry.tenant, Line()).add(entry)
        if not entry.again:
            self._num_bounded += 1
            self._num_tokens += entry.num_tokens

    def head(self) -> int | None:
        """The request whose turn it is."""
        if not self._entries:
            return None
        band = self._bands[max(self._bands)]
        tenant = min(band, key=self._counters.__getitem__)
        return band[tenant].head().request

    def take(self, request: int, now: float) -> None:
        """It goes to a worker; its tenant pays for the prompt, once."""
        entry = self._entries[request]
        self.remove(request)
        self._floor = self._counters[entry.tenant]
        if not entry.again:
            self._counters[entry.tenant] += PROMPT_WEIGHT * entry.num_tokens
            self._rate.add(entry.num_tokens, now)

    def remove(self, request: int) -> None:
        """It no longer waits; unknown: nothing."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        band = self._bands[entry.priority]
        band[entry.tenant].remove(entry)
        if not band[entry.tenant]:
            del band[entry.tenant]
        if not band:
            del self._bands[entry.priority]
        if not entry.again:
            self._num_bounded -= 1
            self._num_tokens -= entry.num_tokens

    def served(self, tenant: str, num_tokens: int) -> None:
        """A tenant got tokens of an answer."""
        if tenant in self._counters:
            self._counters[tenant] += OUTPUT_WEIGHT * num_tokens

    def requests(self) -> list[int]:
        return list(self._entries)

    def _waiting(self) -> set[str]:
        return {tenant for band in self._bands.values() for tenant in band}

    def _lift(self, tenant: str) -> None:
        if any(tenant in band for band in self._bands.values()):
            return
        waiting = [self._counters[other] for band in self._bands.values() for other in band]
        own = self._counters.pop(tenant, 0.0)
        self._counters[tenant] = max(own, min(waiting, default=self._floor))
        if len(self._counters) > MAX_TENANTS:
            self._forget_one()

    def _forget_one(self) -> None:
        waiting = self._waiting()
        idle = next((name for name in self._counters if name not in waiting), None)
        if idle is not None and idle != next(reversed(self._counters)):
            del self._counters[idle]

    def check(self) -> None:
        """AssertionError if the sums and the lines do not agree."""
        lines = [line for band in self._bands.values() for line in band.values()]
        queued = [entry for line in lines for entry in (*line.again.values(), *line.fresh.values())]
        assert all(lines), "an empty line is kept"
        assert {entry.request: entry for entry in queued} == self._entries
        fresh = [entry for entry in queued if not entry.again]
        assert self._num_bounded == len(fresh)
        assert self._num_tokens == sum(entry.num_tokens for entry in fresh)
        assert len(fresh) <= max(self._max_queued, 1), "more wait than the bound allows"
