"""Time limits of requests: deadlines, and the longest time without any available worker."""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.router.routing.events import Status
from penstock.router.routing.placement.fleet import Fleet
from penstock.router.routing.queue.slo_order import prefill_capacity
from penstock.router.routing.request_state import RequestState
from penstock.router.routing.worker_registry import WorkerRegistry
from penstock.router.routing.worker_view import WorkerView

DEADLINE_PASSED = "the deadline passed"
ENOUGH = 4
"""A prompt is in time if there is time to compute it this many times (see `_is_enough`)."""


def why_too_late(state: RequestState, views: Sequence[WorkerView], now: float) -> str:
    """Return why it is too late to place a request, or an empty string if it is not too late.

    It is too late after the deadline. For a request that was never placed, it is also too late if
    the workers, at their measured speed, cannot compute the prompt by the deadline.
    """
    left = state.request.deadline - now
    if left <= 0:
        return DEADLINE_PASSED
    # The capacity takes longer to compute than the rest of a placement if there are many workers.
    if left == float("inf") or _is_enough(left, len(state.request.prompt), views):
        return ""
    capacity = None if state.attempt else prefill_capacity(views)
    if capacity is None:
        return ""
    seconds = len(state.request.prompt) * capacity.seconds_per_token
    if seconds <= left:
        return ""
    return (
        f"{left:.1f} s are left before the deadline, but computing the prompt takes about "
        f"{seconds:.1f} s"
    )


def _is_enough(seconds: float, num_tokens: int, views: Sequence[WorkerView]) -> bool:
    """Return whether workers of mean speed could compute a prompt `ENOUGH` times in `seconds`."""
    return isinstance(views, Fleet) and ENOUGH * num_tokens <= seconds * views.mean_speed


class RequestTimeouts:
    """The time limits of all requests: deadlines, and the longest time without any worker."""

    def __init__(self, no_worker_timeout_seconds: float) -> None:
        self._no_worker_timeout_seconds = no_worker_timeout_seconds
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, request id)
        # Time since which no worker is available; None if one is available.
        self._no_worker_since: float | None = 0.0

    def add(self, state: RequestState) -> None:
        """Watch the deadline of a new request."""
        if state.request.deadline != float("inf"):
            heapq.heappush(self._deadlines, (state.request.deadline, state.request.id))

    def workers_changed(self, registry: WorkerRegistry, now: float) -> None:
        """Update the time since which no worker is available.

        Call this after a worker was added, was lost, began to drain or is no longer stuck.
        """
        if any(view.can_wait_for for view in registry):
            self._no_worker_since = None
        elif self._no_worker_since is None:
            self._no_worker_since = now

    def expired(
        self, states: Mapping[int, RequestState], now: float
    ) -> Iterator[tuple[RequestState, Status, str]]:
        """Yield the requests that exceed a time limit, each with its status and error message."""
        while self._deadlines and self._deadlines[0][0] <= now:
            state = states.get(heapq.heappop(self._deadlines)[1])
            if state is None:
                continue
            if self._no_worker_since is not None and state.is_unassigned:
                yield state, Status.UNAVAILABLE, "no worker is available"
            else:
                yield state, Status.DEADLINE, DEADLINE_PASSED
        yield from self._expired_without_workers(list(states.values()), now)

    def _expired_without_workers(
        self, states: Iterable[RequestState], now: float
    ) -> Iterator[tuple[RequestState, Status, str]]:
        bound = now - self._no_worker_timeout_seconds
        if self._no_worker_since is None or self._no_worker_since > bound:
            return
        for state in states:
            if state.is_unassigned and state.arrived_at <= bound:
                yield state, Status.UNAVAILABLE, "no worker is available"
