"""A ring buffer of explanations: where the router's latest requests ran, and why there.

An explanation is recorded at the few events of a request that change its state, never per token.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from penstock.router.observability.explained_request import ExplainedRequest
from penstock.router.observability.request_metrics import OTHER_TENANT, FinishedRequest
from penstock.router.routing import events as ev
from penstock.router.routing.decisions import DecisionListener
from penstock.router.routing.placement.candidate_report import candidates_of
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.policy import Placement
from penstock.router.routing.request_state import RequestState
from penstock.router.routing.worker_view import WorkerView

MAX_ENDED = 1024
"""Number of ended requests whose explanations are kept."""
MAX_DECISIONS = 256
"""Number of decisions that are kept for the operators' page."""


class Decision(NamedTuple):
    """A request that was sent to a worker.

    Attributes:
        number: sequence number of the decision at this router, from 1.
        at: seconds since 1970.
        request_id: the client's id of the request.
        tenant: name of the API key.
        worker: the worker that got the request.
        other_worker: the worker that will decode, or the source of the KV blocks; empty if neither
            exists.
        reason: why this worker was chosen, in a few words.
    """

    number: int
    at: float
    request_id: str
    tenant: str
    worker: str
    other_worker: str
    reason: str


class Explanations(DecisionListener):
    """The explanations of open requests and of the latest ended ones.

    Args:
        tenant_names: name of each tenant in metrics.
        strategy: the placement strategy: see `placement.routing_strategies`.
        max_ended: number of ended requests that are kept.
        wall_clock: returns seconds since 1970.
    """

    def __init__(
        self,
        tenant_names: Mapping[str, str],
        strategy: str,
        max_ended: int = MAX_ENDED,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._tenant_names = tenant_names
        self._strategy = strategy
        self._max_ended = max_ended
        self._wall_clock = wall_clock
        self._numbers = count(1)
        self._open: dict[int, ExplainedRequest] = {}
        self._ended: deque[ExplainedRequest] = deque()
        # Requests by client id, then by number: clients may use the same id several times.
        self._by_id: dict[str, dict[int, ExplainedRequest]] = {}
        self._event: ev.Event | None = None  # the event that is being handled

    def find(self, request_id: str, tenant: str | None) -> Sequence[ExplainedRequest]:
        """Return the requests to which a client gave this id, in order of arrival.

        Args:
            request_id: the client's id.
            tenant: the tenant whose requests are returned, or None for all tenants.
        """
        found = self._by_id.get(request_id, {})
        return [
            found[number]
            for number in sorted(found)
            if tenant is None or found[number].tenant == tenant
        ]

    def get(self, number: int, request_id: str) -> ExplainedRequest | None:
        """Return the request with this number and id, or None if it is not kept."""
        return self._by_id.get(request_id, {}).get(number)

    # -------------------------------------------------------------- arrival and end

    def opened(self, request: ev.Request, now: float) -> None:
        """Record that a request was accepted."""
        name = self._tenant_names.get(request.tenant, OTHER_TENANT)
        explained = ExplainedRequest(request, name, self._wall_clock(), now)
        self._open[request.id] = explained
        self._by_id.setdefault(request.external_id, {})[request.id] = explained

    def ended(self, finished: FinishedRequest | None, now: float) -> None:
        """Record the end of a request; do nothing for None."""
        if finished is None:
            return
        explained = self._open.pop(finished.request.id, None)
        if explained is None:
            return
        explained.end(finished, now)
        self._ended.append(explained)
        if len(self._ended) > self._max_ended:
            self._forget(self._ended.popleft())

    def _forget(self, explained: ExplainedRequest) -> None:
        same_id = self._by_id[explained.request_id]
        del same_id[explained.number]
        if not same_id:
            del self._by_id[explained.request_id]

    # -------------------------------------------------------------- events and commands

    def observe(self, event: ev.Event, now: float) -> None:
        """Record an event; must be called before the dispatcher handles the event."""
        self._event = event
        if type(event) is ev.Stepped and event.cached:
            for request, attempt, num_tokens in event.cached:
                explained = self._open.get(request)
                if explained is not None:
                    explained.admitted(event, attempt, num_tokens, now)

    def placed(
        self,
        state: RequestState,
        placement: Placement,
        demand: Demand,
        workers: Sequence[WorkerView],
        now: float,
    ) -> None:
        explained = self._open.get(state.request.id)
        if explained is not None:
            found = candidates_of(workers, demand, placement, now)
            explained.placed(placement, found, len(workers), self._strategy, now)

    def changed(self, state: RequestState, now: float) -> None:
        explained = self._open.get(state.request.id)
        if explained is not None:
            explained.changed(state, self._event, now)

    def moving(self, state: RequestState, reason: str) -> None:
        explained = self._open.get(state.request.id)
        if explained is not None:
            explained.moving(reason)

    def submitted(self, command: ev.Submit, now: float) -> None:
        """Record that a request is sent to a worker."""
        explained = self._open.get(command.request.id)
        if explained is None:
            return
        sent = explained.submitted(command, now)
        self.decisions.append(
            Decision(
                next(self._numbers),
                self._wall_clock(),
                explained.request_id,
                explained.tenant_name,
                sent.worker,
                sent.other_worker,
                sent.detail,
            )
        )

    def sent(self, command: ev.Send, now: float) -> None:
        """Record the start of a KV transfer."""
        explained = self._open.get(command.request)
        if explained is not None:
            explained.sent(command, now)
