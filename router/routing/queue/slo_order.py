"""Prompts that wait where first tokens are promised within a time: which of them goes next.

They wait in one line at the router, and a worker is given about as much as it can do next: so who
is next is found out when somebody has time, for all workers together.

By when each is due, as long as that keeps all promises. Where it does not, those stand back without
which most of the others keep theirs (Moore and Hodgson, 1968: of who would be served up to the
first that is late, the longest), and those that nothing can save any more. So a burst that is too
large costs few requests what they were promised; in order of arrival it costs nearly all of them,
since each waits behind some that are late already.

Nobody is passed over for ever: once somebody has waited for `PATIENCE` times what is promised,
every `STARVATION_INTERVAL`-th that is taken is the one that waits longest. Bands of priority and
the turns of tenants are `fair_queue`'s, as without promises: this is the order of one tenant's
prompts.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.router.routing.worker_registry import WorkerView

PREFILL_FACTOR = 5.0
"""Promised: the first token within some seconds and so many times its prompt's time alone."""
SLO_FRACTION = 0.9
"""Of the seconds promised: a step more or less is not known beforehand."""
STARVATION_FACTOR = 10.0
STARVATION_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class PrefillCapacity:
    """Who computes what waits."""

    workers: float  # less than one: the others' time is not theirs
    seconds_per_token: float  # of a prompt, on one of them, what is cached counted; 0: not known

    def divided(self, num_queues: int) -> "PrefillCapacity":
        """What one of so many lines has of it."""
        return PrefillCapacity(self.workers / num_queues, self.seconds_per_token)


class QueuedPrompt(NamedTuple):
    """One that waits, as the choice sees it."""

    arrived_at: float
    seconds: float  # of computing its prompt, among others

    def due(self, ttft_slo: float) -> float:
        """When its prompt is to be computed."""
        # Among others it takes up to a quarter longer than alone.
        return self.arrived_at + SLO_FRACTION * ttft_slo + 0.8 * PREFILL_FACTOR * self.seconds


def prefill_capacity(views: Sequence[WorkerView]) -> PrefillCapacity | None:
    """Those who compute prompts; None while none of them would soon begin with another one."""
    usable = [view for view in views if view.is_usable]
    found = [view for view in usable if view.role != "decode"] or usable
    # A decode worker may be asked to compute a prompt itself: see `disaggregation`.
    if not any(view.has_prefill_slot for view in usable):
        return None
    speeds = [view.prefill_rate for view in usable if view.prefill_rate.is_calibrated]
    if not speeds:
        return PrefillCapacity(len(found), 0.0)
    uncached = sum(speed.uncached_fraction for speed in speeds)
    return PrefillCapacity(len(found), uncached / sum(speed.tokens_per_second for speed in speeds))


def select_next(
    prompts: Sequence[QueuedPrompt], now: float, ttft_slo: float, workers: float, num_dequeued: int
) -> int:
    """The place in `waits`, in order of arrival, of who goes next; so many were taken before."""
    old = prompts[0].arrived_at + STARVATION_FACTOR * ttft_slo < now
    if old and num_dequeued % STARVATION_INTERVAL == 0:
        return 0
    return moore_hodgson(prompts, now, ttft_slo, workers)


def moore_hodgson(
    prompts: Sequence[QueuedPrompt], now: float, ttft_slo: float, workers: float = 1.0
) -> int:
    """The place in `waits`, in order of arrival, of who goes next; of all that still can keep what
    is promised as many as possible then do.

    So many workers are taken to be one that is as many times as fast, but that each prompt, once
    its turn has come, takes its own time. Where nobody can be in time, the first one.
    """
    latest = [each.due(ttft_slo) - each.seconds for each in prompts]  # to begin
    able = [index for index, begin in enumerate(latest) if now <= begin]
    due = [begin + each.seconds / workers for begin, each in zip(latest, prompts, strict=True)]
    able.sort(key=lambda index: (due[index], index))
    end, back = now, set[int]()
    longest: list[tuple[float, int]] = []  # a heap: minus the seconds, minus the place
    for index in able:
        seconds = prompts[index].seconds / workers
        end += seconds
        heapq.heappush(longest, (-seconds, -index))
        if end > due[index]:
            less, later = heapq.heappop(longest)
            end += less
            back.add(-later)
    return next((index for index in able if index not in back), 0)
