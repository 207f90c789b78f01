"""Decision when a router reports that it is ready. Pure: no clock, no I/O."""

from collections.abc import Collection

PARTIAL_SECONDS = 30.0
"""How long a new router waits for a second kind of worker once the first is ready."""


class Readiness:
    """Readiness of a router, from the roles of its ready workers.

    A router is ready if any worker is: without prefill workers, decode workers do all the work, and
    the other way round. But a router that has just started in a cluster with pools of both kinds
    first waits for one of each. An earlier burst would be placed on the worker that
    happened to start first, and stay there until its last token.

    Args:
        waits_for_both: the cluster always has at least one prefill and one decode worker.
        wakes_workers: queued requests start workers, so a router is ready without any.
    """

    def __init__(self, waits_for_both: bool, wakes_workers: bool) -> None:
        self._waits_for_both = waits_for_both
        self._wakes_workers = wakes_workers
        self._first_ready_at: float | None = None

    def not_ready_reason(self, ready_roles: Collection[str], num_workers: int, now: float) -> str:
        """Return why the router is not ready, or an empty string if it is.

        Args:
            ready_roles: role of each ready worker: prefill, decode or mixed.
            num_workers: workers that are connected, ready or not.
            now: seconds on a clock that never goes back.
        """
        if self._wakes_workers:
            return ""
        if not ready_roles:
            return "no worker is ready" if num_workers else "no worker is connected"
        if self._first_ready_at is None:
            self._first_ready_at = now
        if self._waits_for_both and now - self._first_ready_at < PARTIAL_SECONDS:
            for role in ("prefill", "decode"):
                if not {role, "mixed"} & set(ready_roles):
                    return f"no {role} worker is ready yet"
        self._waits_for_both = False
        return ""
