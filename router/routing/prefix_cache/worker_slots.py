"""Numbers for workers, so that a set of workers is a bit mask."""

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

Workers: TypeAlias = int
"""A set of workers as a bit mask: bit i is 1 if the set contains the worker with slot i."""


class WorkerSlots:
    """Assigns a number, the slot, to each worker.

    Several prefix indexes use the same slots, so that their sets of workers can be combined. A slot
    is free again once every index that acquired it has released it.
    """

    def __init__(self) -> None:
        self.version = 0  # changes whenever a slot is assigned or freed
        self.names: list[str] = []  # worker of each slot, or empty if the slot is free
        self._slots: dict[str, int] = {}  # slot of each worker
        self._free: list[int] = []
        self._users: Counter[str] = Counter()  # number of indexes that use a worker's slot

    def acquire(self, worker: str) -> int:
        """Return the slot of a worker for one more index. A new worker gets a free slot."""
        self._users[worker] += 1
        slot = self._slots.get(worker)
        if slot is None:
            self.version += 1
            if self._free:
                slot = self._free.pop()
                self.names[slot] = worker
            else:
                slot = len(self.names)
                self.names.append(worker)
            self._slots[worker] = slot
        return slot

    def release(self, worker: str) -> None:
        """Release a worker's slot for one of the indexes that acquired it."""
        self._users[worker] -= 1
        if not self._users[worker]:
            del self._users[worker]
            slot = self._slots.pop(worker)
            self.names[slot] = ""
            self._free.append(slot)
            self.version += 1

    def find(self, worker: str) -> int | None:
        """Return the slot of a worker, or None if no index uses one for this worker."""
        return self._slots.get(worker)


def bits(workers: Workers) -> Iterator[int]:
    """Yield the slots of a set of workers, in ascending order."""
    while workers:
        lowest = workers & -workers
        yield lowest.bit_length() - 1
        workers ^= lowest
