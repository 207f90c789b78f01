"""Interface through which the dispatcher reports its decisions about requests."""

from collections.abc import Sequence

from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.policy import Placement
from penstock.router.routing.request_state import RequestState
from penstock.router.routing.worker_view import WorkerView


class DecisionListener:
    """A listener that ignores all decisions; subclasses override the methods.

    The methods run while an event is handled. They must not change their arguments.
    """

    def placed(
        self,
        state: RequestState,
        placement: Placement,
        demand: Demand,
        workers: Sequence[WorkerView],
        now: float,
    ) -> None:
        """Called when the policy has chosen the workers of a queued request.

        Args:
            state: the request, which is not yet submitted to the chosen worker.
            placement: the chosen workers.
            demand: the properties of the request that the policy used.
            workers: all connected workers, also those that cannot take the request.
            now: the time, in seconds of the router's monotonic clock.
        """

    def changed(self, state: RequestState, now: float) -> None:
        """Called after each event that may have changed the `state` of an open request."""

    def moving(self, state: RequestState, reason: str) -> None:
        """Called when a request starts to move to another worker.

        `reason` is a phrase of a few words.
        """
