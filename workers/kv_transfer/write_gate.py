"""Thread-safe gates that keep the ranks from writing into the blocks of a closed epoch."""

import threading
from collections.abc import Callable


class WriteGate:
    """Counts the writers to a transfer's blocks; after `close`, admits no new writer.

    When the last writer has left a closed gate, the gate calls the function that `close` was
    given.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._after: Callable[[], None] | None = None
        self._closed = False

    def enter(self) -> bool:
        with self._lock:
            self._num_inside += not self._closed
            return not self._closed

    def leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            after = self._after if self._num_inside == 0 else None
        if after is not None:
            after()

    def close(self, after: Callable[[], None]) -> None:
        """Admit no more writers; call `after`, in any thread, once the last writer has left."""
        with self._lock:
            self._closed = True
            if self._num_inside:
                self._after = after
                return
        after()


def _closed_gate() -> WriteGate:
    gate = WriteGate()
    gate.close(lambda: None)
    return gate


class WriteGates:
    """The gates of one rank, by epoch. The methods must be called from one thread.

    An epoch that has been drained stays closed. Epochs are numbered from 1, and in the end every
    epoch is drained. The set of drained epochs therefore stays small: it contains only drained
    epochs whose number is above that of the first undrained epoch.
    """

    def __init__(self) -> None:
        self._gates: dict[int, WriteGate] = {}
        self._drained: set[int] = set()
        self._first_undrained = 1

    def get(self, epoch: int) -> WriteGate:
        """Return the gate of an epoch; create it if needed. After `drain`, the gate is closed."""
        if epoch < self._first_undrained or epoch in self._drained:
            return _closed_gate()
        return self._gates.setdefault(epoch, WriteGate())

    def drain(self, epoch: int, after: Callable[[], None]) -> None:
        """Close an epoch; call `after`, in any thread, once the last writer has left."""
        gate = self._gates.pop(epoch, None) or WriteGate()
        self._drained.add(epoch)
        while self._first_undrained in self._drained:
            self._drained.remove(self._first_undrained)
            self._first_undrained += 1
        gate.close(after)
