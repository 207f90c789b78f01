"""Decides whether a router is ready, and reports each change. Pure code: no clock, no I/O."""

from collections.abc import Callable, Collection

PARTIAL_SECONDS = 30.0
"""Seconds that a new router waits for workers of the other role after a first worker is ready."""


class Readiness:
    """Determines the readiness of a router from the roles of its ready workers.

    In general, a router is ready if any worker is ready, because workers of one role can do all the
    work. A new router in a cluster with prefill and decode pools first waits for a worker of each
    role, but at most `PARTIAL_SECONDS`. Otherwise all requests of an early burst would go to the
    worker that started first, and would stay there until they end.

    Args:
        waits_for_both: whether the cluster always has at least one prefill and one decode worker.
        wakes_workers: whether queued requests start workers; a router is then ready even without
            workers.
    """

    def __init__(self, waits_for_both: bool, wakes_workers: bool) -> None:
        self._waits_for_both = waits_for_both
        self._wakes_workers = wakes_workers
        self._first_ready_at: float | None = None

    def not_ready_reason(self, ready_roles: Collection[str], num_workers: int, now: float) -> str:
        """Return why the router is not ready, or an empty string if it is.

        Args:
            ready_roles: roles of the ready workers: prefill, decode or mixed.
            num_workers: number of connected workers, ready or not.
            now: seconds on a monotonic clock.
        """
        if self._wakes_workers:
            return ""
        if not ready_roles:
            return "no worker is ready" if num_workers else "no worker is connected"
        if self._first_ready_at is None:
            self._first_ready_at = now
        if self._waits_for_both and now - self._first_ready_at < PARTIAL_SECONDS:
            for role in ("prefill", "decode"):
                if not {role, "mixed"}.intersection(ready_roles):
                    return f"no {role} worker is ready yet"
        self._waits_for_both = False
        return ""


class ReadinessListeners:
    """Calls listeners whenever the reason why a router is not ready changes.

    Args:
        reason: the initial reason; empty if the router is ready.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason  # the reason that was last reported
        self._listeners: list[Callable[[str], None]] = []

    def add(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the last reported reason now, and with each new reason later."""
        self._listeners.append(listener)
        listener(self._reason)

    def report(self, reason: str) -> None:
        """Call all listeners if the reason has changed."""
        if reason != self._reason:
            self._reason = reason
            for listener in self._listeners:
                listener(reason)
