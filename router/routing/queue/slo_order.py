"""Order of one tenant's queued prompts under a time-to-first-token SLO.

Prompts wait at the router, and each worker gets only about two steps of work. The next prompt is
therefore chosen when a worker has room, from one queue for all workers.

Prompts are ordered by deadline (earliest first) while all deadlines can be met. If not all can be
met, the longest prompts are deferred so that as many other prompts as possible meet their deadlines
(Moore and Hodgson, 1968). Prompts that can no longer meet their deadline go last. With this order,
a burst that is too large makes few requests late. With the order of arrival, nearly all requests
would be late, because each waits for earlier requests that are already late.

To prevent starvation, the oldest prompt is sometimes taken out of order. Once it has waited for
`STARVATION_FACTOR` times the SLO, every `STARVATION_INTERVAL`-th prompt that is taken is the oldest
one. The SLO does not change priorities or the fairness between tenants: see `fair_queue`.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.router.routing.placement.disaggregation import ignores_roles
from penstock.router.routing.worker_view import WorkerView

PREFILL_FACTOR = 5.0
"""The SLO is `ttft_slo` seconds plus this factor times the prompt's own compute time."""
SLO_FRACTION = 0.9
"""Deadlines use this fraction of `ttft_slo`; the rest is slack for about one step."""
STARVATION_FACTOR = 10.0
STARVATION_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class PrefillCapacity:
    """Number and speed of the workers that compute queued prompts."""

    workers: float  # number of workers, which may be a fraction
    seconds_per_token: float  # seconds per prompt token (cached or not) on one worker; 0 if unknown

    def divided(self, num_queues: int) -> "PrefillCapacity":
        """Return the capacity for each of `num_queues` queues that share the workers equally."""
        return PrefillCapacity(self.workers / num_queues, self.seconds_per_token)


class QueuedPrompt(NamedTuple):
    """Arrival time and compute time of a queued prompt."""

    arrived_at: float  # time of arrival, in seconds of the router's monotonic clock
    seconds: float  # compute time of the prompt in a batch with other prompts

    def due(self, ttft_slo: float) -> float:
        """Return the time by which the prompt must be computed, on the clock of `arrived_at`."""
        # A prompt takes up to 1.25 times as long in a batch as alone, hence the factor 0.8.
        return self.arrived_at + SLO_FRACTION * ttft_slo + 0.8 * PREFILL_FACTOR * self.seconds


def prefill_capacity(views: Sequence[WorkerView]) -> PrefillCapacity | None:
    """Return the capacity of the workers that compute prompts.

    The result is None if no worker can start a prompt now.
    """
    usable = [view for view in views if view.is_usable]
    found = usable
    if not ignores_roles(usable):
        found = [view for view in usable if view.role != "decode"] or usable
    # Decode workers are included, because they may compute prompts (see `disaggregation`).
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
        prompts: one or more prompts.
        now: the time, in seconds of the router's monotonic clock.
        ttft_slo: time-to-first-token SLO in seconds.
        workers: number of workers that compute the prompts; may be a fraction.
        num_dequeued: prompts taken from this queue so far.
    """
    old = prompts[0].arrived_at + STARVATION_FACTOR * ttft_slo < now
    if old and num_dequeued % STARVATION_INTERVAL == 0:
        return 0
    return moore_hodgson(prompts, now, ttft_slo, workers)


def moore_hodgson(
    prompts: Sequence[QueuedPrompt], now: float, ttft_slo: float, workers: float = 1.0
) -> int:
    """Return the index of the prompt to start next, to meet as many deadlines as possible.

    `prompts` are ordered by arrival. If no prompt can meet its deadline, the result is 0. The
    workers are approximated by a single worker that is `workers` times as fast. Only the latest
    start of a prompt is computed from its compute time on a real worker.
    """
    latest = [each.due(ttft_slo) - each.seconds for each in prompts]  # latest start of each prompt
    able = [index for index, begin in enumerate(latest) if now <= begin]
    due = [begin + each.seconds / workers for begin, each in zip(latest, prompts, strict=True)]
    able.sort(key=lambda index: (due[index], index))
    end, back = now, set[int]()
    # Heap of (-seconds, -index), with the longest prompt first.
    longest: list[tuple[float, int]] = []
    for index in able:
        seconds = prompts[index].seconds / workers
        end += seconds
        heapq.heappush(longest, (-seconds, -index))
        if end > due[index]:
            less, later = heapq.heappop(longest)
            end += less
            back.add(-later)
    return next((index for index in able if index not in back), 0)
