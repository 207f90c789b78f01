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
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.router.routing.placement.disaggregation import ignores_roles
from penstock.router.routing.worker_view import WorkerView

Seconds: TypeAlias = npt.NDArray[np.float64]

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


def due_times(arrived_at: Seconds, seconds: Seconds, ttft_slo: float) -> Seconds:
    """Return the times by which prompts must be computed, on the clock of `arrived_at`.

    `seconds` are the compute times of the prompts in a batch with other prompts.
    """
    # A prompt takes up to 1.25 times as long in a batch as alone, hence the factor 0.8.
    return arrived_at + SLO_FRACTION * ttft_slo + 0.8 * PREFILL_FACTOR * seconds


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
    arrived_at: Sequence[float],
    num_tokens: Sequence[int],
    now: float,
    ttft_slo: float,
    capacity: PrefillCapacity,
    num_dequeued: int,
) -> int:
    """Return the index of the next prompt among one or more prompts, ordered by arrival.

    Args:
        arrived_at: arrival time of each prompt, in seconds of the router's monotonic clock.
        num_tokens: tokens of each prompt.
        now: the time, on the same clock.
        ttft_slo: time-to-first-token SLO in seconds.
        capacity: capacity of the workers that compute the prompts.
        num_dequeued: prompts taken from this queue so far.
    """
    old = arrived_at[0] + STARVATION_FACTOR * ttft_slo < now
    if len(arrived_at) == 1 or (old and num_dequeued % STARVATION_INTERVAL == 0):
        return 0
    seconds = np.array(num_tokens, np.float64) * capacity.seconds_per_token
    return moore_hodgson(np.array(arrived_at), seconds, now, ttft_slo, capacity.workers)


def moore_hodgson(
    arrived_at: Seconds, seconds: Seconds, now: float, ttft_slo: float, workers: float = 1.0
) -> int:
    """Return the index of the prompt to start next, to meet as many deadlines as possible.

    The prompts are ordered by arrival. If no prompt can meet its deadline, the result is 0. The
    workers are approximated by a single worker that is `workers` times as fast. Only the latest
    start of a prompt is computed from its compute time on a real worker.
    """
    latest = due_times(arrived_at, seconds, ttft_slo) - seconds  # latest start of each prompt
    able = np.flatnonzero(now <= latest)
    if not able.size:
        return 0
    durations = seconds / workers
    due = latest + durations
    order = able[np.argsort(due[able], kind="stable")]
    due, durations = due[order], durations[order]
    ends = np.cumsum(np.concatenate(([now], durations)))
    late = np.flatnonzero(ends[1:] > due)
    if not late.size:
        return int(order[0])
    # The steps below begin with the first prompt that would be late.
    first, end = int(late[0]), float(ends[late[0]])
    # Heap of (-seconds, -index), with the longest prompt first.
    entries = list(zip((-durations).tolist(), (-order).tolist(), strict=True))
    longest, back = entries[:first], set[int]()
    heapq.heapify(longest)
    for entry, limit in zip(entries[first:], due[first:].tolist(), strict=True):
        end -= entry[0]
        if end > limit:
            less, later = heapq.heappushpop(longest, entry)
            end += less
            back.add(-later)
        else:
            heapq.heappush(longest, entry)
    return next((index for index in order.tolist() if index not in back), 0)
