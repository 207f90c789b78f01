"""All workers of a router, with their liveness, assigned roles and views."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.events import WorkerInfo
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.fleet import Fleet
from penstock.router.routing.worker_view import PENALTY_SECONDS, WorkerView


@dataclass(frozen=True, slots=True)
class LivenessBounds:
    """Time limits of a worker, in seconds unless noted."""

    suspect_after: float = 2.0
    lost_after: float = 10.0
    # A worker counts as lost or stuck only after a time of at least this many of its last step's
    # durations, even if `lost_after` or `stuck_after` is shorter.
    lost_steps: float = 20.0
    # Upper limit of the time that follows from `lost_steps`, because a worker may report any
    # duration of its last step.
    longest_silence: float = 600.0
    # Time without a completed step after which a worker with work is stuck.
    stuck_after: float = 45.0


class WorkerRegistry:
    """All workers with an open stream.

    Args:
        bounds: time limits after which a worker is suspect, lost or stuck.
        queues_at_router: whether prompts queue at the router, so that a worker gets only about two
            steps of work.
    """

    def __init__(
        self, bounds: LivenessBounds, queues_at_router: bool = False, tpot_slo_seconds: float = 0.0
    ) -> None:
        self._bounds = bounds
        self.queues_at_router = queues_at_router
        self.tpot_slo_seconds = tpot_slo_seconds
        self._views: dict[str, WorkerView] = {}
        # The fleet made from `_views`, or None if `views` must make a new one.
        self._fleet: Fleet[WorkerView] | None = None
        self._roles: dict[str, str] = {}  # roles assigned by operators, by worker name
        self.transfer_costs = TransferCostModel()
        self._lost_at: dict[str, float] = {}
        # For each worker that was lost while it was stuck: its incarnation and its number of
        # completed steps.
        self._stuck_workers: dict[str, tuple[str, int]] = {}
        self._checked_at: float | None = None

    def get(self, worker: str | None) -> WorkerView | None:
        return None if worker is None else self._views.get(worker)

    def views(self) -> Sequence[WorkerView]:
        """Return the views of all workers.

        The call takes longer after a worker or role has changed, because it makes a new fleet.
        """
        if self._fleet is None:
            self._fleet = Fleet(self._views.values())
        return self._fleet

    def __iter__(self) -> Iterator[WorkerView]:
        """Iterate over the views of all workers without making the arrays of a fleet."""
        return iter(self._views.values())

    def __len__(self) -> int:
        return len(self._views)

    def add(self, info: WorkerInfo, load: WorkerLoad, now: float) -> WorkerView:
        """Add a worker whose stream has opened."""
        lost_at = self._lost_at.get(info.worker, float("-inf"))
        role = self._roles.get(info.worker)
        view = WorkerView(info, load, now, lost_at, role, self.queues_at_router)
        # A stuck worker that reconnects remains stuck if it has completed no step since.
        view.stuck = self._stuck_workers.pop(info.worker, None) == (
            info.incarnation,
            load.num_steps,
        )
        self._views[info.worker] = view
        self._fleet = None
        return view

    @property
    def roles(self) -> Mapping[str, str]:
        """Roles that operators assigned, by worker name."""
        return self._roles

    def assign(self, worker: str, role: str) -> WorkerView | None:
        """Assign a role to a worker and to later workers of the same name."""
        self._roles[worker] = role
        view = self._views.get(worker)
        if view is not None:
            view.assign(role)
            self._fleet = None
        return view

    def remove(self, worker: str, now: float) -> None:
        """Remove a lost worker and remember when it was lost."""
        view = self._views.pop(worker)
        self._fleet = None
        if view.stuck:
            self._stuck_workers[worker] = (view.info.incarnation, view.load.num_steps)
        self._lost_at = {
            name: when for name, when in self._lost_at.items() if now - when < PENALTY_SECONDS
        }
        self._lost_at[worker] = now

    def back_off(self, worker: str, now: float) -> None:
        """Treat a worker as full until its next load report, but at most for `suspect_after`."""
        self._views[worker].backed_off_at = now

    def no_larger_than(self, worker: str) -> list[str]:
        """Return the workers whose limits are all at most those of `worker`.

        The limits are those on context length, sequences and KV tokens.
        """
        size = _size(self._views[worker].info)
        return [
            name
            for name, view in self._views.items()
            if all(own <= its for own, its in zip(_size(view.info), size, strict=True))
        ]

    def check_liveness(self, now: float) -> tuple[list[WorkerView], list[WorkerView]]:
        """Return two lists: the workers that have just become suspect, and the newly lost ones."""
        self._discount_own_pause(now)
        suspects: list[WorkerView] = []
        silent: list[WorkerView] = []
        suspect_after = self._bounds.suspect_after
        is_fine_for = min(suspect_after, self._bounds.lost_after)
        for view in self._views.values():
            if view.backed_off_at is not None and now - view.backed_off_at > suspect_after:
                # An idle worker may send no load report that would end the back-off.
                view.backed_off_at = None
            silence = now - view.last_received
            if silence <= is_fine_for:
                continue
            if silence > self._silence_bound(view, self._bounds.lost_after):
                silent.append(view)
            elif silence > suspect_after and not view.suspect:
                view.suspect = True
                suspects.append(view)
        return suspects, silent

    def find_stuck(
        self, busy_since: Callable[[WorkerView], float | None], now: float
    ) -> list[WorkerView]:
        """Return the workers that respond and have work, but completed no step in time.

        Args:
            busy_since: returns the time since which a worker has had runnable work, or None.
            now: the time, in seconds of the router's monotonic clock.
        """
        found = []
        for view in self._views.values():
            if view.suspect or view.stuck or not view.num_sequences:
                # Time in which the worker is silent, stuck or idle does not count.
                view.last_progress = now
                continue
            bound = self._silence_bound(view, self._bounds.stuck_after)
            if now - view.last_progress > bound:
                since = busy_since(view)
                if since is None:
                    view.last_progress = now
                elif now - since > bound:
                    view.stuck = True
                    found.append(view)
        return found

    def _silence_bound(self, view: WorkerView, minimum: float) -> float:
        bounds = self._bounds
        steps = bounds.lost_steps * view.load.last_step_seconds
        return max(minimum, min(steps, bounds.longest_silence))

    def _discount_own_pause(self, now: float) -> None:
        """Shift the times of workers, so that a pause of this router does not count as silence."""
        slept = 0.0 if self._checked_at is None else now - self._checked_at
        self._checked_at = now
        if slept > self._bounds.suspect_after:
            for view in self._views.values():
                view.last_received = min(now, view.last_received + slept)
                view.last_progress = min(now, view.last_progress + slept)


def _size(info: WorkerInfo) -> tuple[int, int, int]:
    return info.max_model_len, info.max_sequences, info.num_blocks * info.block_size
