"""Sequences that wait for a row where first tokens are promised within a time: who goes next.

By arrival, as long as that keeps all promises. Where it does not, those stand back without which
most of the others keep theirs (Moore and Hodgson, 1968: of who would be served up to the first that
is late, the longest), and those that nothing can save any more. So a burst that is too large costs
few requests what they were promised; in order of arrival it costs nearly all of them, since each
waits behind some that are late already.

Priorities come first in any case, and nobody is passed over for ever: once somebody has waited for
`PATIENCE` times what is promised, every `TURN`-th that is taken is the one that waits longest.
"""

import heapq
from collections.abc import Sequence
from math import exp
from typing import NamedTuple

from penstock.workers.scheduling.waiting import Ticket

PREFILLS = 5.0
"""Promised: the first token within some seconds and so many times its prompt's time alone."""
AIM = 0.9
"""Of the seconds promised: a step more or less is not known beforehand."""
PATIENCE = 10.0
TURN = 4
MEMORY_SECONDS = 20.0
"""Of computing prompts: what a token took longer ago counts less and less."""


class Wait(NamedTuple):
    """One that waits, as the choice sees it."""

    since: float
    seconds: float  # of computing its prompt, among others

    def due(self, promised: float) -> float:
        """When its prompt is to be computed."""
        # Among others it takes up to a quarter longer than alone.
        return self.since + AIM * promised + 0.8 * PREFILLS * self.seconds


def in_time(waits: Sequence[Wait], now: float, promised: float) -> int:
    """The place in `waits`, in order of arrival, of who goes next; of all that still can keep what
    is promised as many as possible then do, one being computed after the other.

    Where nobody can, the first one.
    """
    due = [each.due(promised) for each in waits]
    able = [place for place, each in enumerate(waits) if now + each.seconds <= due[place]]
    able.sort(key=lambda place: (due[place], place))
    end, back = now, set[int]()
    longest: list[tuple[float, int]] = []  # a heap: minus the seconds, minus the place
    for place in able:
        end += waits[place].seconds
        heapq.heappush(longest, (-waits[place].seconds, -place))
        if end > due[place]:
            seconds, later = heapq.heappop(longest)
            end += seconds
            back.add(-later)
    return next((place for place in able if place not in back), 0)


class PromptPace:
    """Seconds that computing a prompt's token takes, from when steps are planned."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0  # 0: not known yet
        self._tokens = self._seconds = 0.0
        self._last = (0.0, 0)

    def planned(self, now: float, computed: int) -> None:
        """A step is planned, and so many prompt tokens were computed in all before it."""
        (then, before), self._last = self._last, (now, computed)
        if computed <= before or now <= then:
            return
        kept = exp((then - now) / MEMORY_SECONDS)
        self._tokens = kept * self._tokens + computed - before
        self._seconds = kept * self._seconds + now - then
        self.seconds_per_token = self._seconds / self._tokens


class PromisedQueue:
    """Like `WaitingQueue`, in another order.

    Args:
        promised: seconds to the first token, beside `PREFILLS` times the prompt's own.
    """

    def __init__(self, promised: float) -> None:
        self.num_tokens = 0  # to compute, over all that wait
        self._promised = promised
        self._pace = PromptPace()
        self._now = 0.0
        self._waiting: dict[int, Ticket] = {}  # by number
        self._since: dict[int, float] = {}  # by number; from the step that saw it first
        self._unseen: list[int] = []
        self._num_taken = 0  # in all, to see whose turn it is
        self._head: Ticket | None = None  # as found last, while nothing has changed

    @property
    def timed(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._waiting)

    def planning(self, now: float, computed: int) -> None:
        """A step is planned: see `PromptPace.planned`."""
        self._pace.planned(now, computed)
        self._now, self._head = now, None
        for number in self._unseen:
            if number in self._waiting:
                self._since[number] = now
        self._unseen.clear()

    def push(self, ticket: Ticket) -> None:
        self._waiting[ticket.number] = ticket
        self._unseen.append(ticket.number)
        self.num_tokens += ticket.num_uncomputed
        self._head = None

    def head(self) -> Ticket | None:
        """Who is next, left in its place."""
        if self._head is None and self._waiting:
            self._head = self._next()
        return self._head

    def remove(self, ticket: Ticket) -> None:
        """Take one out, wherever it stands."""
        del self._waiting[ticket.number]
        self._since.pop(ticket.number, None)
        self.num_tokens -= ticket.num_uncomputed
        self._num_taken += ticket is self._head
        self._head = None

    def _next(self) -> Ticket:
        first = min(self._waiting.values(), key=lambda each: (_band(each), each.number))
        if _goes_on(first):
            return first
        band = [each for each in self._waiting.values() if _band(each) == _band(first)]
        band.sort(key=lambda each: each.number)
        waits = [
            Wait(self._since.get(each.number, self._now), self._seconds(each)) for each in band
        ]
        old = waits[0].since + PATIENCE * self._promised < self._now
        if old and self._num_taken % TURN == 0:
            return band[0]
        return band[in_time(waits, self._now, self._promised)]

    def _seconds(self, ticket: Ticket) -> float:
        return ticket.num_uncomputed * self._pace.seconds_per_token


def _goes_on(ticket: Ticket) -> bool:
    """It has tokens of its answer already: whoever gets them waits for the next."""
    return len(ticket.tokens) > ticket.new.num_prompt


def _band(ticket: Ticket) -> tuple[int, bool]:
    """Who goes first has the smaller one."""
    return -ticket.new.priority, not _goes_on(ticket)
