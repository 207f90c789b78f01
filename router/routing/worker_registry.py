"""The workers as the router sees them: alive or silent, how loaded, who holds what."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.events import WorkerInfo
from penstock.router.routing.placement.cost_model import PrefillRate, TransferCostModel

PENALTY_SECONDS = 30.0
"""For so long, fading, a worker that was lost is liked less in placement."""
PREFILL_SLOT_STEPS = 2.0
"""So many steps' work waits at a worker whose queue is to be shallow: the one under way and the
next, so that it never stands still."""


@dataclass(frozen=True, slots=True)
class LivenessBounds:
    """How long silence may last, in seconds."""

    suspect_after: float = 2.0
    lost_after: float = 10.0
    lost_steps: float = 20.0  # a worker whose steps are long may be silent for so many of them
    stuck_after: float = 45.0  # without a step's end while something runs there, or `lost_steps`


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """What a request takes of a worker, as long as it is placed there."""

    num_sequences: int
    num_blocks: int


class WorkerView:
    """One worker, from its introduction to its loss. Policies read it; only `WorkerRegistry` writes
    it."""

    def __init__(
        self,
        info: WorkerInfo,
        load: WorkerLoad,
        now: float,
        lost_at: float,
        role: str | None = None,
        queues_at_router: bool = False,
    ) -> None:
        self.queues_at_router = (
            queues_at_router  # prompts wait at the router until it can begin with them
        )
        self.info = info
        self.name = info.worker
        self.role = info.role if role is None else role  # what it is chosen for
        self.assigned_role = role  # by an operator; None: it has the role that it says
        self.load = load
        self.prefill_rate = PrefillRate(load)
        self.last_received = now
        self.lost_at = lost_at  # when a worker of this name was last lost
        self.last_progress = now  # when it last got on with what it has
        self.suspect = False
        self.draining = False
        self.stuck = False  # known as such from an earlier stream, and no step has ended since
        self.backed_off_at: float | None = None  # it rejected something since its last load report
        self.num_gaps = 0
        self.num_assigned = 0  # ever
        self.requests: dict[
            int, ResourceUsage | None
        ] = {}  # a request: its share, or None for a mere lease
        self.num_sequences = 0  # sums over the shares
        self.num_blocks = 0
        self.new_tokens = 0  # placed since the last load report
        self.new_sequences = 0
        self.unseen_tokens = 0  # placed before it, and not in it yet
        self.num_foreign_sequences = 0  # sequences of other routers, when it last reported
        self.num_foreign_blocks = 0
        self._update_foreign()
        self._update_sort_keys()

    def assign(self, role: str) -> None:
        self.role = self.assigned_role = role

    @property
    def is_shedding(self) -> bool:
        """It was made a prefill worker: what it generates goes on elsewhere."""
        return self.assigned_role == "prefill"

    @property
    def is_usable(self) -> bool:
        """New work may go there at all."""
        return not (self.suspect or self.draining or self.stuck)

    @property
    def can_wait_for(self) -> bool:
        """It can be waited for."""
        return not (self.draining or self.stuck)

    @property
    def is_backed_off(self) -> bool:
        """It was full a moment ago."""
        return self.backed_off_at is not None

    @property
    def state(self) -> str:
        if self.draining:
            return "draining"
        if self.stuck:
            return "stuck"
        return "suspect" if self.suspect else "ready"

    @property
    def backlog_tokens(self) -> int:
        """Tokens that it has yet to compute before it can begin with something new."""
        return self.load.queued_tokens + self.new_tokens + self.unseen_tokens

    @property
    def has_prefill_slot(self) -> bool:
        """Whether a prompt may go there now, as far as those before it are concerned."""
        backlog = self.backlog_tokens
        if not self.queues_at_router or not backlog:
            return True
        return (
            backlog
            < PREFILL_SLOT_STEPS * self.load.last_step_seconds * self.prefill_rate.tokens_per_second
        )

    @property
    def num_busy(self) -> int:
        """Sequences there, those of other routers included."""
        reported = self.load.running + self.load.queued + self.new_sequences
        return max(self.num_sequences, reported)

    def resource_usage(self, num_tokens: int, num_sequences: int) -> ResourceUsage:
        blocks = -(-(num_tokens + num_sequences) // self.info.block_size)
        return ResourceUsage(num_sequences, blocks)

    def has_capacity(self, num_tokens: int, num_sequences: int) -> bool:
        """Whether it could begin with so much soon; one that has nothing of this router always
        can, so that no router is kept out by the others."""
        if self.is_backed_off:
            return False
        if not self.num_sequences:
            return True
        usage = self.resource_usage(num_tokens, num_sequences)
        num_sequences = self.num_sequences + self.num_foreign_sequences + usage.num_sequences
        num_blocks = self.num_blocks + self.num_foreign_blocks + usage.num_blocks
        return num_sequences <= self.info.max_sequences and num_blocks <= self.info.num_blocks

    def penalty(self, now: float) -> float:
        """From 1, just lost, to 0."""
        return max(0.0, 1.0 - (now - self.lost_at) / PENALTY_SECONDS)

    def set_usage(self, request: int, usage: ResourceUsage | None) -> None:
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
                self.new_tokens = self.unseen_tokens = 0  # an idle worker may report no more
            self._update_sort_keys()

    def note_assigned(self, num_tokens: int, num_sequences: int) -> None:
        self.num_assigned += 1
        self.new_tokens += num_tokens
        self.new_sequences += num_sequences
        self._update_sort_keys()

    def update_load(self, load: WorkerLoad, now: float) -> None:
        if load.num_steps != self.load.num_steps:
            self.last_progress = now
            self.stuck = False
        self.load = load
        self.prefill_rate.add(load)
        self.backed_off_at = None
        # What came during the step that has ended is not in its report.
        seen = not self.queues_at_router or load.running + load.queued >= self.num_sequences
        self.unseen_tokens = 0 if seen else self.new_tokens
        self.new_tokens = 0
        self.new_sequences = 0
        self._update_foreign()
        self._update_sort_keys()

    def _update_sort_keys(self) -> None:
        """Placement looks at every worker: what it orders them by is made when it changes."""
        busy, num_assigned, info = self.num_busy, self.num_assigned, self.info
        self.by_queue = (self.backlog_tokens, busy, num_assigned, self.name)
        filled = self.num_blocks / info.num_blocks
        self.by_utilization = (busy / info.max_sequences, filled, num_assigned, self.name)

    def _update_foreign(self) -> None:
        """What its report has that is not this router's; what was dropped a moment ago may be
        taken for somebody else's until the next one."""
        load = self.load
        self.num_foreign_sequences = max(0, load.running + load.queued - self.num_sequences)
        taken = self.info.num_blocks - load.free_blocks - load.cached_blocks - load.leased_blocks
        self.num_foreign_blocks = (
            max(0, taken - self.num_blocks) if self.num_foreign_sequences else 0
        )

    def check(self) -> None:
        usages = [usage for usage in self.requests.values() if usage is not None]
        assert self.num_sequences == sum(usage.num_sequences for usage in usages)
        assert self.num_blocks == sum(usage.num_blocks for usage in usages)


class WorkerRegistry:
    """All workers that have a stream; `shallow`: none is given more than it can do next."""

    def __init__(self, bounds: LivenessBounds, queues_at_router: bool = False) -> None:
        self._bounds = bounds
        self.queues_at_router = queues_at_router
        self._views: dict[str, WorkerView] = {}
        self._roles: dict[str, str] = {}  # given by an operator, also to workers yet to come
        self.transfer_costs = TransferCostModel()
        self._lost_at: dict[str, float] = {}
        self._stuck_workers: dict[
            str, tuple[str, int]
        ] = {}  # incarnation, and steps that had ended
        self._checked_at: float | None = None

    def get(self, worker: str | None) -> WorkerView | None:
        return None if worker is None else self._views.get(worker)

    def views(self) -> Sequence[WorkerView]:
        return list(self._views.values())

    def __len__(self) -> int:
        return len(self._views)

    def add(self, info: WorkerInfo, load: WorkerLoad, now: float) -> WorkerView:
        lost_at = self._lost_at.get(info.worker, float("-inf"))
        role = self._roles.get(info.worker)
        view = WorkerView(info, load, now, lost_at, role, self.queues_at_router)
        # A new stream to it says nothing of its engine.
        view.stuck = self._stuck_workers.pop(info.worker, None) == (
            info.incarnation,
            load.num_steps,
        )
        self._views[info.worker] = view
        return view

    @property
    def roles(self) -> Mapping[str, str]:
        """Those that an operator gave, by worker."""
        return self._roles

    def assign(self, worker: str, role: str) -> WorkerView | None:
        """Give a worker, and whoever follows it under its name, that role."""
        self._roles[worker] = role
        view = self._views.get(worker)
        if view is not None:
            view.assign(role)
        return view

    def remove(self, worker: str, now: float) -> None:
        view = self._views.pop(worker)
        if view.stuck:
            self._stuck_workers[worker] = (view.info.incarnation, view.load.num_steps)
        self._lost_at = {
            name: when for name, when in self._lost_at.items() if now - when < PENALTY_SECONDS
        }
        self._lost_at[worker] = now

    def back_off(self, worker: str, now: float) -> None:
        """It rejected something: full for now, until its next load report or for a moment."""
        self._views[worker].backed_off_at = now

    def no_larger_than(self, worker: str) -> list[str]:
        """The workers on which nothing fits that can never fit on this one."""
        size = _size(self._views[worker].info)
        return [
            name
            for name, view in self._views.items()
            if all(own <= its for own, its in zip(_size(view.info), size, strict=True))
        ]

    def check_liveness(self, now: float) -> tuple[list[WorkerView], list[WorkerView]]:
        """Those that became suspect since the last look, and those silent past their bound."""
        self._discount_own_pause(now)
        suspects: list[WorkerView] = []
        silent: list[WorkerView] = []
        for view in self._views.values():
            silence = now - view.last_received
            if (
                view.backed_off_at is not None
                and now - view.backed_off_at > self._bounds.suspect_after
            ):
                view.backed_off_at = None  # an idle worker has no load to report
            if silence > self._silence_bound(view, self._bounds.lost_after):
                silent.append(view)
            elif silence > self._bounds.suspect_after and not view.suspect:
                view.suspect = True
                suspects.append(view)
        return suspects, silent

    def find_stuck(
        self, busy_since: Callable[[WorkerView], float | None], now: float
    ) -> list[WorkerView]:
        """Those that answer, while no step of theirs ends past the bound; `busy_since` tells of a
        worker since when it has had something to compute, None if it has not."""
        found = []
        for view in self._views.values():
            if view.suspect or view.stuck or not view.num_sequences:
                view.last_progress = now  # silent, known already, or idle
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
        """Silence while the router itself was not listening says nothing of the workers."""
        slept = 0.0 if self._checked_at is None else now - self._checked_at
        self._checked_at = now
        if slept > self._bounds.suspect_after:
            for view in self._views.values():
                view.last_received = min(now, view.last_received + slept)
                view.last_progress = min(now, view.last_progress + slept)


def _size(info: WorkerInfo) -> tuple[int, int, int]:
    return info.max_model_len, info.max_sequences, info.num_blocks * info.block_size
