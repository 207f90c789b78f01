"""A queue that assigns the jobs of several tenants to slots (threads or processes) fairly."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from penstock.router.errors import Code, ServingError

J = TypeVar("J")

LEAST_SIZE = 1024
"""Smaller jobs count as this size, so that the bounds also limit the number of jobs."""

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
"""Bounds of the time after which the client of a refused job should retry."""

SPEED_SECONDS = 10.0
"""Time constant of the measured speed: busy seconds after which a job counts 1/e as much."""

MAX_REMEMBERED = 1024
"""The service of at most this many tenants is remembered while they have no waiting jobs."""


class Begun(NamedTuple, Generic[J]):
    """A job that may begin now, and the slot in which it runs."""

    slot: int
    job: J


@dataclass(slots=True)
class _Tenant(Generic[J]):
    served: int  # service that the tenant has received, in the unit of the jobs' sizes
    # The tenant's waiting jobs with their sizes.
    jobs: deque[tuple[J, int]] = field(default_factory=deque)
    size: int = 0  # total size of the tenant's waiting jobs


@dataclass(slots=True)
class _Slot:
    tenant: str = ""
    began_at: float = 0.0  # when the first job of `sizes` began, in seconds
    sizes: deque[int] = field(default_factory=deque)  # sizes of the jobs that have not ended


class FairLine(Generic[J]):
    """A bounded queue of jobs that begin in a fair order.

    The jobs of one tenant begin in order of arrival. A slot serves one tenant at a time, and a
    tenant uses one slot at a time, so that one tenant cannot fill all slots. The tenant with the
    least service is next (start-time fair queueing).

    Args:
        max_size: largest total size of the waiting jobs. One tenant may use a quarter of it.
        num_slots: number of slots.
        slot_size: largest total size of the jobs in a slot; an idle slot accepts any job.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        max_size: int,
        num_slots: int,
        slot_size: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_size = max_size
        self._slot_size = slot_size
        self._now = clock
        # Total size and busy seconds of the jobs that have ended; later jobs count more.
        self._done_size = self._done_seconds = 0.0
        self._size = 0
        self._clock = 0  # largest service that a tenant had received when it was chosen
        self._slots = [_Slot() for _ in range(num_slots)]
        self._tenants: dict[str, _Tenant[J]] = {}  # tenants with waiting jobs
        self._served: dict[str, int] = {}  # recently served tenants without waiting jobs

    @property
    def num_waiting(self) -> int:
        """Number of jobs that have not begun."""
        return sum(len(tenant.jobs) for tenant in self._tenants.values())

    def add(self, name: str, job: J, size: int) -> None:
        """Append a job of a tenant.

        Raises:
            ServingError: OVERLOADED if the waiting jobs are too large already.
        """
        size = max(size, LEAST_SIZE)
        tenant = self._tenants.get(name)
        own = 0 if tenant is None else tenant.size
        # An empty queue accepts a job of any size, since otherwise a large job would never run.
        num_slots, num_tenants = len(self._slots), len(self._tenants)
        if own and own + size > self._max_size // 4:
            raise self._refusal(own, min(1.0, num_slots / num_tenants))
        if self._size and self._size + size > self._max_size:
            raise self._refusal(self._size, min(num_slots, num_tenants))
        if tenant is None:
            tenant = _Tenant(max(self._clock, self._served.pop(name, 0)))
            self._tenants[name] = tenant
        tenant.jobs.append((job, size))
        tenant.size += size
        self._size += size

    def take(self, usable: Collection[int]) -> Begun[J] | None:
        """Return a job that may begin in one of the `usable` slots now; None if there is none."""
        bound = {slot.tenant: number for number, slot in enumerate(self._slots) if slot.sizes}
        free = [name for name in self._tenants if name not in bound]
        first = min(free, key=self._service, default=None)
        idle = next((number for number in usable if not self._slots[number].sizes), None)
        if first is not None and idle is not None:
            return self._begin(first, idle)
        for name in sorted(bound.keys() & self._tenants.keys(), key=self._service):
            # Start no other job: tenant `first` has no slot, has had less service, and gets the
            # next idle slot.
            if first is not None and self._service(first) < self._service(name):
                return None
            slot = self._slots[bound[name]]
            _, size = self._tenants[name].jobs[0]
            if bound[name] in usable and sum(slot.sizes) + size <= self._slot_size:
                return self._begin(name, bound[name])
        return None

    def end(self, number: int, extra: int = 0, was_done: bool = True) -> None:
        """Record the end of a slot's first job.

        Args:
            number: the slot.
            extra: service to add for the slot's tenant.
            was_done: False if the job was dropped; it then has no effect on the measured speed.
        """
        slot, now = self._slots[number], self._now()
        size = slot.sizes.popleft()
        if was_done:
            # Several jobs may end at the same time, if their results arrive together.
            seconds = now - slot.began_at
            weight = math.exp(-seconds / SPEED_SECONDS)
            self._done_size = weight * self._done_size + size
            self._done_seconds = weight * self._done_seconds + seconds
        slot.began_at = now  # when the next job of the slot, if there is one, begins
        if slot.tenant in self._tenants:
            self._tenants[slot.tenant].served += extra
        elif slot.tenant in self._served:
            self._served[slot.tenant] += extra

    def remove(self, name: str, job: J) -> None:
        """Remove a waiting job from the queue. A job that has begun is not changed."""
        tenant = self._tenants.get(name)
        for entry in tenant.jobs if tenant is not None else ():
            if entry[0] is job:
                self._remove(name, entry)
                return

    def clear(self) -> list[J]:
        """Remove all jobs from the queue and return them."""
        jobs = [job for tenant in self._tenants.values() for job, _ in tenant.jobs]
        self._tenants.clear()
        self._size = 0
        return jobs

    def _refusal(self, size: int, num_slots: float) -> ServingError:
        """Return the OVERLOADED error. Jobs of total size `size` wait, and use `num_slots` slots.

        A fraction of a slot means that tenants take turns.
        """
        seconds = 0.0
        if self._done_size:
            seconds = size / num_slots * self._done_seconds / self._done_size
        return ServingError(
            Code.OVERLOADED,
            "too many texts wait to be tokenized or parsed: call again later",
            retry_after=min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS),
        )

    def _service(self, name: str) -> int:
        return self._tenants[name].served

    def _begin(self, name: str, number: int) -> Begun[J]:
        tenant = self._tenants[name]
        job, size = tenant.jobs[0]
        self._clock = max(self._clock, tenant.served)
        tenant.served += size
        self._remove(name, tenant.jobs[0])
        slot = self._slots[number]
        slot.tenant = name
        if not slot.sizes:
            slot.began_at = self._now()
        slot.sizes.append(size)
        return Begun(number, job)

    def _remove(self, name: str, entry: tuple[J, int]) -> None:
        tenant = self._tenants[name]
        tenant.jobs.remove(entry)
        tenant.size -= entry[1]
        self._size -= entry[1]
        if not tenant.jobs:
            del self._tenants[name]
            self._served[name] = tenant.served
            if len(self._served) > MAX_REMEMBERED:
                del self._served[next(iter(self._served))]
