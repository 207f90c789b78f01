"""The load of a cluster in two numbers, for load balancers in front of the routers."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.router.worker_links.worker_link import WorkerLink

MAX_AGE_SECONDS = 0.1


class ClusterLoad(NamedTuple):
    """The load of all connected workers and of one router's queue.

    Attributes:
        kv_usage: fraction of the workers' KV slots that are used, leased or reserved, from 0 to 1.
        num_waiting: number of requests that wait at this router or at the workers.
    """

    kv_usage: float
    num_waiting: int


class ClusterLoadMeter:
    """Measures the load, at most once in `MAX_AGE_SECONDS`, because there may be many workers.

    Args:
        links: returns the links to all workers.
        num_queued: returns the length of the router's queue.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        links: Callable[[], Sequence[WorkerLink]],
        num_queued: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._links = links
        self._num_queued = num_queued
        self._clock = clock
        self._measured_at = float("-inf")
        self._load = ClusterLoad(0.0, 0)

    def read(self) -> ClusterLoad:
        """Return the load; the value is at most `MAX_AGE_SECONDS` old."""
        now = self._clock()
        if now - self._measured_at > MAX_AGE_SECONDS:
            self._load, self._measured_at = self._measure(), now
        return self._load

    def _measure(self) -> ClusterLoad:
        num_waiting, num_held, num_slots = self._num_queued(), 0, 0
        for link in self._links():
            if link.info is not None and link.load is not None:
                num_waiting += link.load.queued + link.load.deferred
                num_held += link.load.held_blocks * link.info.block_size
                num_slots += link.load.num_blocks * link.info.block_size
        return ClusterLoad(num_held / max(num_slots, 1), num_waiting)
