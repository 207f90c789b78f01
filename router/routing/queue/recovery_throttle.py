"""Limits how many requests of lost workers are recomputed at a time."""


class RecoveryThrottle:
    """Holds back requests of lost workers, so that they do not overload the other workers.

    Args:
        num_per_worker: requests per worker that may be recomputed at a time.
    """

    def __init__(self, num_per_worker: int) -> None:
        self._num_per_worker = num_per_worker
        self._waiting: dict[int, None] = {}  # ids of held requests, in order of arrival
        # Ids of released requests that have no new token yet.
        self._recovering: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: int) -> bool:
        return request in self._waiting

    def add(self, request: int) -> None:
        """Hold back a request."""
        self._recovering.pop(request, None)
        self._waiting[request] = None

    def release(self, num_workers: int) -> list[int]:
        """Return the held requests that may be placed now, and stop holding them."""
        num_free = self._num_per_worker * num_workers - len(self._recovering)
        released = list(self._waiting)[: max(num_free, 0)]
        for request in released:
            del self._waiting[request]
            self._recovering[request] = None
        return released

    def discard(self, request: int) -> None:
        """Remove a request that has a new token or has ended."""
        self._waiting.pop(request, None)
        self._recovering.pop(request, None)
