"""Order of one tenant's queued prompts under a time-to-first-token SLO.

Prompts wait at the router, and each worker gets only about as much as it can compute next. The next
prompt is therefore chosen when a worker has room, from one queue for all workers.

Prompts are ordered by deadline (earliest first) while all deadlines can be met. If not all can be
met, the longest prompts are deferred so that as many others as possible meet theirs (Moore and
Hodgson, 1968); prompts that can no longer meet their deadline go last. A burst that is too large
then makes few requests late; in order of arrival nearly all would be late, since each would wait
behind some that already are.

To prevent starvation, once the oldest prompt has waited for `STARVATION_FACTOR` times the SLO,
every `STARVATION_INTERVAL`-th prompt that is taken is the oldest one. Priorities and fairness
between tenants are those of `fair_queue`, as without an SLO.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.router.routing.worker_registry import WorkerView

PREFILL_FACTOR = 5.0
"""The SLO is `ttft_slo` seconds plus this factor times the prompt's own compute time."""
SLO_FRACTION = 0.9
"""Share of `ttft_slo` that is planned with; the rest is slack for about one step."""
STARVATION_FACTOR = 10.0
STARVATION_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class PrefillCapacity:
    """The workers that compute queued prompts."""

    workers: float  # number of workers; less than 1: a share of one
    seconds_per_token: float  # per prompt token, cached ones included, on one worker; 0: unknown

    def divided(self, num_queues: int) -> "PrefillCapacity":
        """Return the share of one of `num_queues` queues."""
        return PrefillCapacity(self.workers / num_queues, self.seconds_per_token)


class QueuedPrompt(NamedTuple):
    """A queued prompt as `select_next` sees it."""

    arrived_at: float  # clock seconds
    seconds: float  # to compute the prompt, in a batch with others

    def due(self, ttft_slo: float) -> float:
        """Return the time by which the prompt must have been computed."""
        # In a batch it takes up to 1.25 times as long as alone, hence the factor 0.8.
        return self.arrived_at + SLO_FRACTION * ttft_slo + 0.8 * PREFILL_FACTOR * self.seconds


def prefill_capacity(views: Sequence[WorkerView]) -> PrefillCapacity | None:
    """Return the capacity of the workers that compute prompts; None if all are occupied."""
    usable = [view for view in views if view.is_usable]
    found = [view for view in usable if view.role != "decode"] or usable
    # Decode workers count here, since they may compute a prompt themselves: `disaggregation`.
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
    """Return the index of the next prompt in `prompts`, which are ordered by arrival.

    Args:
        prompts: at least one.
        now: clock seconds.
        ttft_slo: seconds.
        workers: number of workers that compute them.
        num_dequeued: prompts taken from this queue so far.
    """
    old = prompts[0].arrived_at + STARVATION_FACTOR * ttft_slo < now
    if old and num_dequeued % STARVATION_INTERVAL == 0:
        return 0
    return moore_hodgson(prompts, now, ttft_slo, workers)


def moore_hodgson(
    prompts: Sequence[QueuedPrompt], now: float, ttft_slo: float, workers: float = 1.0
) -> int:
    """Return the index of the prompt to start so that as many as possible meet their deadline.

    `prompts` are ordered by arrival; if none can meet its deadline, the first one is returned.
    Several workers are approximated by one that is `workers` times as fast, except that a prompt
    takes its full time once it has started.
    """
    latest = [each.due(ttft_slo) - each.seconds for each in prompts]  # latest start times
    able = [index for index, begin in enumerate(latest) if now <= begin]
    due = [begin + each.seconds / workers for begin, each in zip(latest, prompts, strict=True)]
    able.sort(key=lambda index: (due[index], index))
    end, back = now, set[int]()
    longest: list[tuple[float, int]] = []  # heap of (-seconds, -index)
    for index in able:
        seconds = prompts[index].seconds / workers
        end += seconds
        heapq.heappush(longest, (-seconds, -index))
        if end > due[index]:
            less, later = heapq.heappop(longest)
            end += less
            back.add(-later)
    return next((index for index in able if index not in back), 0)
