"""The router's view of its workers: liveness, load, and the requests on each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.events import WorkerInfo
from penstock.router.routing.placement.cost_model import PrefillRate, TransferCostModel

PENALTY_SECONDS = 30.0
"""Seconds in which the placement penalty of a worker that was lost decays to 0."""
PREFILL_SLOT_STEPS = 2.0
"""If prompts queue at the router, a worker gets another prompt while its backlog is below this many
steps: the current step and the next one, so that the worker never idles."""


@dataclass(frozen=True, slots=True)
class LivenessBounds:
    """Time limits of a worker, in seconds unless noted."""

    suspect_after: float = 2.0
    lost_after: float = 10.0
    lost_steps: float = 20.0  # lost_after and stuck_after are at least this many step times
    stuck_after: float = 45.0  # without a completed step while the worker has work


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Capacity that a request takes on a worker."""

    num_sequences: int
    num_blocks: int


class WorkerView:
    """State of one worker from its Welcome message to its loss.

    Policies only read a view; `WorkerRegistry`, `Placer` and `WorkerEventHandler` change it.
    """

    def __init__(
        self,
        info: WorkerInfo,
        load: WorkerLoad,
        now: float,
        lost_at: float,
        role: str | None = None,
        queues_at_router: bool = False,
    ) -> None:
        self.queues_at_router = queues_at_router  # prompts queue at the router, not here
        self.info = info
        self.name = info.worker
        self.role = info.role if role is None else role  # the role that placement uses
        self.assigned_role = role  # assigned by an operator; None: the reported role applies
        self.load = load
        self.prefill_rate = PrefillRate(load)
        self.last_received = now
        self.lost_at = lost_at  # when a worker of this name was last lost; -inf: never
        self.last_progress = now  # when the worker last completed a step or sent tokens
        self.suspect = False
        self.draining = False
        self.stuck = False  # found to be stuck; reset when a step completes
        self.backed_off_at: float | None = None  # time of a rejection since the last load report
        self.num_gaps = 0
        self.num_assigned = 0  # requests placed here since the worker connected
        # Usage by request id; None: the worker only keeps KV blocks under a lease.
        self.requests: dict[int, ResourceUsage | None] = {}
        self.num_sequences = 0  # total of `requests`
        self.num_blocks = 0  # total of `requests`
        self.new_tokens = 0  # tokens to compute that were placed since the last load report
        self.new_sequences = 0  # placed since the last load report
        self.unseen_tokens = 0  # placed before the last load report, but not counted in it
        self.num_foreign_sequences = 0  # of other routers, estimated at the last load report
        self.num_foreign_blocks = 0  # of other routers, estimated at the last load report
        self._update_foreign()
        self._update_sort_keys()

    def assign(self, role: str) -> None:
        """Set the role that an operator assigned."""
        self.role = self.assigned_role = role

    @property
    def is_shedding(self) -> bool:
        """Whether an operator made this a prefill worker: decoding requests must move away."""
        return self.assigned_role == "prefill"

    @property
    def is_usable(self) -> bool:
        """Whether the worker may get new work."""
        return not (self.suspect or self.draining or self.stuck)

    @property
    def can_wait_for(self) -> bool:
        """Whether requests may wait for the worker: a suspect worker may come back."""
        return not (self.draining or self.stuck)

    @property
    def is_backed_off(self) -> bool:
        """Whether the worker has just rejected a request because it was full."""
        return self.backed_off_at is not None

    @property
    def state(self) -> str:
        """Return ready, suspect, stuck or draining."""
        if self.draining:
            return "draining"
        if self.stuck:
            return "stuck"
        return "suspect" if self.suspect else "ready"

    @property
    def backlog_tokens(self) -> int:
        """Number of prompt tokens that the worker must compute before it starts a new prompt."""
        return self.load.queued_tokens + self.new_tokens + self.unseen_tokens

    @property
    def has_prefill_slot(self) -> bool:
        """Whether the worker's backlog is small enough for another prompt."""
        backlog = self.backlog_tokens
        if not self.queues_at_router or not backlog:
            return True
        return (
            backlog
            < PREFILL_SLOT_STEPS * self.load.last_step_seconds * self.prefill_rate.tokens_per_second
        )

    @property
    def num_busy(self) -> int:
        """Number of the worker's sequences, including those of other routers."""
        reported = self.load.running + self.load.queued + self.new_sequences
        return max(self.num_sequences, reported)

    def resource_usage(self, num_tokens: int, num_sequences: int) -> ResourceUsage:
        """Return the capacity that a request with `num_tokens` tokens so far takes here."""
        blocks = -(-(num_tokens + num_sequences) // self.info.block_size)
        return ResourceUsage(num_sequences, blocks)

    def has_capacity(self, num_tokens: int, num_sequences: int) -> bool:
        """Return whether the worker has room for a request with `num_tokens` tokens so far.

        Unless it is backed off, a worker without sequences of this router always has room, so that
        other routers cannot keep this router out.
        """
        if self.is_backed_off:
            return False
        if not self.num_sequences:
            return True
        usage = self.resource_usage(num_tokens, num_sequences)
        num_sequences = self.num_sequences + self.num_foreign_sequences + usage.num_sequences
        num_blocks = self.num_blocks + self.num_foreign_blocks + usage.num_blocks
        return num_sequences <= self.info.max_sequences and num_blocks <= self.info.num_blocks

    def penalty(self, now: float) -> float:
        """Return the placement penalty, which decays from 1 (just after a loss) to 0."""
        return max(0.0, 1.0 - (now - self.lost_at) / PENALTY_SECONDS)

    def set_usage(self, request: int, usage: ResourceUsage | None) -> None:
        """Record the capacity that a request takes here; None: the worker only keeps a lease."""
        self.remove(request)
        self.requests[request] = usage
        if usage is not None:
            self.num_sequences += usage.num_sequences
            self.num_blocks += usage.num_blocks
            self._update_sort_keys()

    def remove(self, request: int) -> None:
        usage = self.requests.pop(request, None)
        if usage is not None:
            self.num_sequences -= usage.num_sequences
            self.num_blocks -= usage.num_blocks
            if self.queues_at_router and not self.num_sequences:
                self.new_tokens = self.unseen_tokens = 0  # an idle worker may not report again
            self._update_sort_keys()

    def note_assigned(self, num_tokens: int, num_sequences: int) -> None:
        """Count a request that was just placed here, until a load report counts it."""
        self.num_assigned += 1
        self.new_tokens += num_tokens
        self.new_sequences += num_sequences
        self._update_sort_keys()

    def update_load(self, load: WorkerLoad, now: float) -> None:
        """Update the view from a load report."""
        if load.num_steps != self.load.num_steps:
            self.last_progress = now
            self.stuck = False
        self.load = load
        self.prefill_rate.add(load)
        self.backed_off_at = None
        # A load report does not count requests that arrived during its step.
        seen = not self.queues_at_router or load.running + load.queued >= self.num_sequences
        self.unseen_tokens = 0 if seen else self.new_tokens
        self.new_tokens = 0
        self.new_sequences = 0
        self._update_foreign()
        self._update_sort_keys()

    def _update_sort_keys(self) -> None:
        """Precompute the sort keys, since each placement compares all workers."""
        busy, num_assigned, info = self.num_busy, self.num_assigned, self.info
        self.by_queue = (self.backlog_tokens, busy, num_assigned, self.name)
        filled = self.num_blocks / info.num_blocks
        self.by_utilization = (busy / info.max_sequences, filled, num_assigned, self.name)

    def _update_foreign(self) -> None:
        """Estimate the capacity that other routers use, from the last load report.

        Requests that this router has just dropped may count as another router's until the next
        report.
        """
        load = self.load
        self.num_foreign_sequences = max(0, load.running + load.queued - self.num_sequences)
        taken = self.info.num_blocks - load.free_blocks - load.cached_blocks - load.leased_blocks
        self.num_foreign_blocks = (
            max(0, taken - self.num_blocks) if self.num_foreign_sequences else 0
        )

    def check(self) -> None:
        """Assert that the totals match `requests`."""
        usages = [usage for usage in self.requests.values() if usage is not None]
        assert self.num_sequences == sum(usage.num_sequences for usage in usages)
        assert self.num_blocks == sum(usage.num_blocks for usage in usages)


class WorkerRegistry:
    """All workers with an open stream.

    Args:
        bounds: time limits after which a worker is suspect, lost or stuck.
        queues_at_router: prompts queue at the router, and a worker gets about two steps of work.
    """

    def __init__(self, bounds: LivenessBounds, queues_at_router: bool = False) -> None:
        self._bounds = bounds
        self.queues_at_router = queues_at_router
        self._views: dict[str, WorkerView] = {}
        self._roles: dict[str, str] = {}  # assigned by operators, by worker name
        self.transfer_costs = TransferCostModel()
        self._lost_at: dict[str, float] = {}
        # Workers lost while stuck: (incarnation, completed steps), by name.
        self._stuck_workers: dict[str, tuple[str, int]] = {}
        self._checked_at: float | None = None

    def get(self, worker: str | None) -> WorkerView | None:
        return None if worker is None else self._views.get(worker)

    def views(self) -> Sequence[WorkerView]:
        """Return the views of all workers."""
        return list(self._views.values())

    def __len__(self) -> int:
        return len(self._views)

    def add(self, info: WorkerInfo, load: WorkerLoad, now: float) -> WorkerView:
        """Add a worker whose stream has opened."""
        lost_at = self._lost_at.get(info.worker, float("-inf"))
        role = self._roles.get(info.worker)
        view = WorkerView(info, load, now, lost_at, role, self.queues_at_router)
        # A stuck worker that reconnects is still stuck if it has completed no step.
        view.stuck = self._stuck_workers.pop(info.worker, None) == (
            info.incarnation,
            load.num_steps,
        )
        self._views[info.worker] = view
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
        return view

    def remove(self, worker: str, now: float) -> None:
        """Remove a lost worker and remember when it was lost."""
        view = self._views.pop(worker)
        if view.stuck:
            self._stuck_workers[worker] = (view.info.incarnation, view.load.num_steps)
        self._lost_at = {
            name: when for name, when in self._lost_at.items() if now - when < PENALTY_SECONDS
        }
        self._lost_at[worker] = now

    def back_off(self, worker: str, now: float) -> None:
        """Treat a worker as full until its next load report, at most for `suspect_after`."""
        self._views[worker].backed_off_at = now

    def no_larger_than(self, worker: str) -> list[str]:
        """Return the workers that are at most as large as `worker` in every dimension."""
        size = _size(self._views[worker].info)
        return [
            name
            for name, view in self._views.items()
            if all(own <= its for own, its in zip(_size(view.info), size, strict=True))
        ]

    def check_liveness(self, now: float) -> tuple[list[WorkerView], list[WorkerView]]:
        """Return two lists: workers that have just become suspect, and workers that are lost."""
        self._discount_own_pause(now)
        suspects: list[WorkerView] = []
        silent: list[WorkerView] = []
        for view in self._views.values():
            silence = now - view.last_received
            if (
                view.backed_off_at is not None
                and now - view.backed_off_at > self._bounds.suspect_after
            ):
                view.backed_off_at = None  # an idle worker sends no load report to reset this
            if silence > self._silence_bound(view, self._bounds.lost_after):
                silent.append(view)
            elif silence > self._bounds.suspect_after and not view.suspect:
                view.suspect = True
                suspects.append(view)
        return suspects, silent

    def find_stuck(
        self, busy_since: Callable[[WorkerView], float | None], now: float
    ) -> list[WorkerView]:
        """Return the workers that respond and have work, but completed no step in time.

        Args:
            busy_since: returns the time since which a worker has had runnable work, or None.
            now: clock seconds.
        """
        found = []
        for view in self._views.values():
            if view.suspect or view.stuck or not view.num_sequences:
                view.last_progress = now  # no limit while the worker is silent, stuck or idle
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
        return max(minimum, self._bounds.lost_steps * view.load.last_step_seconds)

    def _discount_own_pause(self, now: float) -> None:
        """Do not count a pause of the router itself as silence of the workers."""
        slept = 0.0 if self._checked_at is None else now - self._checked_at
        self._checked_at = now
        if slept > self._bounds.suspect_after:
            for view in self._views.values():
                view.last_received = min(now, view.last_received + slept)
                view.last_progress = min(now, view.last_progress + slept)


def _size(info: WorkerInfo) -> tuple[int, int, int]:
    return info.max_model_len, info.max_sequences, info.num_blocks * info.block_size
