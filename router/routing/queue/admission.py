"""Puts new requests into the queue, and refuses requests for which the queue has no room."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from penstock.router.routing.events import Command, Status
from penstock.router.routing.queue.fair_queue import FairQueue
from penstock.router.routing.queue.tenant_queue import QueuedRequest
from penstock.router.routing.queue.timeouts import RequestTimeouts
from penstock.router.routing.request_state import RequestState

Commands: TypeAlias = list[Command]


class QueueAdmission:
    """Decides whether a new request may enter the queue.

    Args:
        queue: the queue of the router.
        timeouts: the time limits, which apply to each admitted request.
        states: all open requests, by id.
        reconcile: `RequestTable.reconcile`, which updates the queue and the worker views after a
            request has ended.
    """

    def __init__(
        self,
        queue: FairQueue,
        timeouts: RequestTimeouts,
        states: Mapping[int, RequestState],
        reconcile: Callable[[RequestState, Commands, float], None],
    ) -> None:
        self._queue = queue
        self._timeouts = timeouts
        self._states = states
        self._reconcile = reconcile

    def admit(self, state: RequestState, out: Commands, now: float) -> None:
        """Make room for a new request in the queue, or refuse the request.

        If the queue is full, requests of tenants with the largest shares may be refused instead.
        """
        entry = queued_request(state, is_requeued=False)
        wait = self._queue.predicted_wait(entry)
        if wait > self._queue.max_wait or now + wait >= state.request.deadline:
            self._refuse(state, f"the wait in the queue would be about {wait:.1f} s", out, now)
            return
        displaced = self._queue.displaced_by(entry)
        if displaced is None:
            self._refuse(state, "the queue has no room for this request", out, now)
            return
        for request in displaced:
            other = self._states[request]
            self._refuse(
                other, "the queue is full, and your requests take the largest part of it", out, now
            )
            self._reconcile(other, out, now)
        self._timeouts.add(state)

    def _refuse(self, state: RequestState, reason: str, out: Commands, now: float) -> None:
        """End a request that was never placed. The client may send the request again later."""
        retry_after = self._queue.retry_after(queued_request(state, is_requeued=False), now)
        state.end(Status.OVERLOADED, f"{reason}: try again later", out, retry_after)


def queued_request(state: RequestState, is_requeued: bool) -> QueuedRequest:
    """Return the properties of a request that the queue uses."""
    request = state.request
    return QueuedRequest(
        request.id,
        request.tenant,
        request.priority,
        len(request.prompt),
        is_requeued,
        state.arrived_at,
        cost=request.num_sequences * (len(request.prompt) + request.max_tokens),
    )
