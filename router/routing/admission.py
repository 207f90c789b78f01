"""The line before the workers: bounded, fair between tenants, in bands of priority.

Fairness is by virtual counters (start-time fair queueing over tokens, as in "Fairness in Serving
Large Language Models", arXiv 2401.00588): a tenant's counter grows with the service it gets, the
waiting tenant with the smallest counter is next, and one that comes back from idleness starts from
the smallest counter of those that are waiting, so that nobody saves up service. Within a tenant's
line requests go by arrival, or, where first tokens are promised, as `promised` has it.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from penstock.router.routing.promised import Crew, Wait, next_of

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
    since: float = 0.0  # when it came


class Line:
    """One tenant's requests in one band, in order: first those that were placed before."""

    __slots__ = ("again", "fresh", "num_taken")

    def __init__(self) -> None:
        self.again: OrderedDict[int, Entry] = OrderedDict()
        self.fresh: OrderedDict[int, Entry] = OrderedDict()
        self.num_taken = 0  # of the fresh ones

    def __bool__(self) -> bool:
        return bool(self.again or self.fresh)

    def add(self, entry: Entry) -> None:
        (self.again if entry.again else self.fresh)[entry.request] = entry

    def remove(self, entry: Entry) -> None:
        del (self.again if entry.again else self.fresh)[entry.request]

    def head(self) -> Entry:
        return next(iter((self.again or self.fresh).values()))

    def next(self, now: float, promised: float, crew: Crew) -> Entry:
        """Who is to go now, where first tokens are promised."""
        if self.again:
            return self.head()
        fresh = list(self.fresh.values())
        pace = crew.seconds_per_token
        waits = [Wait(each.since, each.num_tokens * pace) for each in fresh]
        return fresh[next_of(waits, now, promised, crew.workers, self.num_taken)]


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
    """Requests that wait for a worker.

    Args:
        max_queued, max_queued_tokens: the bound on requests that were not placed before.
        promised: seconds to the first token, see `promised`; 0: nothing is.
    """

    MIN_RETRY, MAX_RETRY = 1.0, 60.0

    def __init__(self, max_queued: int, max_queued_tokens: int, promised: float = 0.0) -> None:
        self._max_queued = max_queued
        self._promised = promised
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
        """The request whose turn it is, by arrival among its tenant's."""
        line = self._line()
        return line.head().request if line is not None else None

    def next(self, now: float, crew: Crew | None) -> int | None:
        """Who goes to a worker now; `crew` are those who compute prompts, None: nobody has time,
        so that only what was placed before may go, which may want no prompt computed."""
        line = self._line()
        if line is None or not self._promised:
            return self.head()
        if crew is None:
            return line.head().request if line.again else None
        num_lines = len(self._bands[max(self._bands)])
        return line.next(now, self._promised, crew.shared(num_lines)).request

    def _line(self) -> Line | None:
        """That of the tenant whose turn it is."""
        if not self._entries:
            return None
        band = self._bands[max(self._bands)]
        return band[min(band, key=self._counters.__getitem__)]

    def take(self, request: int, now: float) -> None:
        """It goes to a worker; its tenant pays for the prompt, once."""
        entry = self._entries[request]
        self._bands[entry.priority][entry.tenant].num_taken += not entry.again
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
