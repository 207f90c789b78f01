"""Prompts that wait where first tokens are promised within a time: which of them goes next.

They wait in one line at the router, and a worker is given about as much as it can do next: so who
is next is found out when somebody has time, for all workers together.

By when each is due, as long as that keeps all promises. Where it does not, those stand back without
which most of the others keep theirs (Moore and Hodgson, 1968: of who would be served up to the
first that is late, the longest), and those that nothing can save any more. So a burst that is too
large costs few requests what they were promised; in order of arrival it costs nearly all of them,
since each waits behind some that are late already.

Nobody is passed over for ever: once somebody has waited for `PATIENCE` times what is promised,
every `TURN`-th that is taken is the one that waits longest. Bands of priority and the turns of
tenants are `admission`'s, as without promises: this is the order of one tenant's prompts.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.router.routing.fleet import WorkerView

PREFILLS = 5.0
"""Promised: the first token within some seconds and so many times its prompt's time alone."""
AIM = 0.9
"""Of the seconds promised: a step more or less is not known beforehand."""
PATIENCE = 10.0
TURN = 4


@dataclass(frozen=True, slots=True)
class Crew:
    """Who computes what waits."""

    workers: float  # less than one: the others' time is not theirs
    seconds_per_token: float  # of a prompt, on one of them, what is cached counted; 0: not known

    def shared(self, lines: int) -> "Crew":
        """What one of so many lines has of it."""
        return Crew(self.workers / lines, self.seconds_per_token)


class Wait(NamedTuple):
    """One that waits, as the choice sees it."""

    since: float
    seconds: float  # of computing its prompt, among others

    def due(self, promised: float) -> float:
        """When its prompt is to be computed."""
        # Among others it takes up to a quarter longer than alone.
        return self.since + AIM * promised + 0.8 * PREFILLS * self.seconds


def crew_of(views: Sequence[WorkerView]) -> Crew | None:
    """Those who compute prompts; None while none of them would soon begin with another one."""
    usable = [view for view in views if view.usable]
    found = [view for view in usable if view.role != "decode"] or usable
    # A decode worker may be asked to compute a prompt itself: see `disaggregation`.
    if not any(view.begins_soon for view in usable):
        return None
    speeds = [view.speed for view in usable if view.speed.known]
    if not speeds:
        return Crew(len(found), 0.0)
    uncached = sum(speed.uncached for speed in speeds)
    return Crew(len(found), uncached / sum(speed.tokens for speed in speeds))


def next_of(
    waits: Sequence[Wait], now: float, promised: float, workers: float, num_taken: int
) -> int:
    """The place in `waits`, in order of arrival, of who goes next; so many were taken before."""
    old = waits[0].since + PATIENCE * promised < now
    if old and num_taken % TURN == 0:
        return 0
    return in_time(waits, now, promised, workers)


def in_time(waits: Sequence[Wait], now: float, promised: float, workers: float = 1.0) -> int:
    """The place in `waits`, in order of arrival, of who goes next; of all that still can keep what
    is promised as many as possible then do.

    So many workers are taken to be one that is as many times as fast, but that each prompt, once
    its turn has come, takes its own time. Where nobody can be in time, the first one.
    """
    latest = [each.due(promised) - each.seconds for each in waits]  # to begin
    able = [place for place, begin in enumerate(latest) if now <= begin]
    due = [begin + each.seconds / workers for begin, each in zip(latest, waits, strict=True)]
    able.sort(key=lambda place: (due[place], place))
    end, back = now, set[int]()
    longest: list[tuple[float, int]] = []  # a heap: minus the seconds, minus the place
    for place in able:
        seconds = waits[place].seconds / workers
        end += seconds
        heapq.heappush(longest, (-seconds, -place))
        if end > due[place]:
            less, later = heapq.heappop(longest)
            end += less
            back.add(-later)
    return next((place for place in able if place not in back), 0)
