"""The router's view of one worker: its state, its load, and the requests on it."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.events import WorkerInfo
from penstock.router.routing.placement.answer_cost import AnswerRate
from penstock.router.routing.placement.cost_model import PrefillRate
from penstock.router.routing.placement.fleet import (
    KV_READ_COST,
    MAX_READS,
    TIE_SCALE,
    Fleet,
    LoadTable,
)

PENALTY_SECONDS = 30.0
"""Seconds after the loss of a worker in which its placement penalty decays to 0."""
SEQUENCE_READS = 2600
"""Fixed cost of a sequence in a decode step, in units of the time to read one KV token.

The value is 78 us / 30 ns, from the simulator's time model.
"""
PREFILL_SLOT_STEPS = 2.0
"""If prompts queue at the router, a worker gets another prompt while its backlog is below this many
steps: the current step and the next one, so that the worker never idles."""


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Capacity that a request takes on a worker: sequences and KV blocks."""

    num_sequences: int
    num_blocks: int
    num_answers: int = 0  # sequences that generate their answer on the worker


class WorkerView:
    """State of one worker from its Welcome message to its loss.

    Policies only read a view; `WorkerRegistry`, `RequestTable` and `WorkerEventHandler` change it.
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
        # Whether prompts queue at the router instead of at the worker.
        self.queues_at_router = queues_at_router
        self.info = info
        self.name = info.worker
        self.role = info.role if role is None else role  # the role that placement uses
        self.assigned_role = role  # role assigned by an operator; None if the reported role applies
        self.load = load
        self.prefill_rate = PrefillRate(load)
        self.answer_rate = AnswerRate(load, now)
        self.last_received = now
        self.lost_at = lost_at  # last loss of a worker of this name; -inf without a loss
        self.last_progress = now  # time at which the worker last completed a step or sent tokens
        self.suspect = False
        self.draining = False
        self.stuck = False  # whether the worker is stuck; False again after a completed step
        self.backed_off_at: float | None = None  # time of a rejection after the last load report
        self.num_gaps = 0
        self.num_assigned = 0  # requests placed on this worker since it connected
        self.assigned_tokens = 0  # tokens that the worker must compute for the assigned requests
        # Usage by request id, or None if the worker only keeps KV blocks under a lease.
        self.requests: dict[int, ResourceUsage | None] = {}
        self.num_sequences = 0  # total number of sequences of `requests`
        self.num_answers = 0  # sequences of `requests` whose answers this worker generates
        self.num_blocks = 0  # total number of blocks of `requests`
        self.new_tokens = 0  # tokens to compute of requests placed since the last load report
        self.new_sequences = 0  # sequences placed since the last load report
        self.unseen_tokens = 0  # tokens to compute of requests that the last report did not count
        self.num_foreign_sequences = 0  # sequences of other routers; estimated from load reports
        self.num_foreign_blocks = 0  # blocks in use by other routers; estimated from load reports
        self._load_table: LoadTable | None = None  # table with a copy of the load
        # Row of this worker in the table, and its index in the fleet.
        self._row = self._position = 0
        self._update_foreign()
        self._update_sort_keys()

    def assign(self, role: str) -> None:
        """Set the role that an operator assigned."""
        self.role = self.assigned_role = role

    @property
    def is_shedding(self) -> bool:
        """Whether an operator made this a prefill worker, so that decoding requests must move."""
        return self.assigned_role == "prefill"

    @property
    def is_usable(self) -> bool:
        """Whether the worker may get new work."""
        return not (self.suspect or self.draining or self.stuck)

    @property
    def can_wait_for(self) -> bool:
        """Whether requests may wait for the worker.

        A suspect worker counts, since it may recover.
        """
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
    def has_prefill_slot(self) -> bool:
        """Whether the worker's backlog is so small that it may get another prompt."""
        backlog = self.backlog_tokens
        if not self.queues_at_router or not backlog:
            return True
        return (
            backlog
            < PREFILL_SLOT_STEPS * self.load.last_step_seconds * self.prefill_rate.tokens_per_second
        )

    def set_load_table(self, table: LoadTable, row: int, position: int) -> None:
        """Write the load to `row` of `table` from now on; `position`: index in the fleet."""
        self._load_table, self._row, self._position = table, row, position
        self._update_sort_keys()
        self._update_speeds(table)

    def resource_usage(
        self, num_tokens: int, num_sequences: int, num_answers: int = 0
    ) -> ResourceUsage:
        """Return the capacity that a request with `num_tokens` tokens takes on the worker."""
        num_blocks = -(-(num_tokens + num_sequences) // self.info.block_size)
        return ResourceUsage(num_sequences, num_blocks, num_answers)

    def has_capacity(self, num_tokens: int, num_sequences: int) -> bool:
        """Return whether the worker has room for a request with `num_tokens` tokens so far.

        A worker without sequences of this router always has room, unless it is backed off. Without
        this rule, other routers could exclude this router from the worker.
        """
        if self.backed_off_at is not None:
            return False
        if not self.num_sequences:
            return True
        info = self.info
        blocks = -(-(num_tokens + num_sequences) // info.block_size)
        taken = self.num_sequences + self.num_foreign_sequences
        return (
            taken + num_sequences <= info.max_sequences
            and self.num_blocks + self.num_foreign_blocks + blocks <= info.num_blocks
        )

    def penalty(self, now: float) -> float:
        """Return the placement penalty, which decays from 1 (just after a loss) to 0."""
        return max(0.0, 1.0 - (now - self.lost_at) / PENALTY_SECONDS)

    def set_usage(
        self, request: int, usage: ResourceUsage | None, new_tokens: int | None = None
    ) -> None:
        """Record the capacity that a request takes on this worker.

        A `usage` of None means that the worker only keeps a lease for the request. `new_tokens` is
        given if the request was just placed here. It is the number of tokens to compute, which
        count as queued until a load report counts the request.
        """
        old = self.requests.pop(request, None)
        self.requests[request] = usage
        if new_tokens is not None:
            self.num_assigned += 1
            self.new_tokens += new_tokens
            self.assigned_tokens += new_tokens
            self.new_sequences += usage.num_sequences if usage is not None else 0
        elif usage == old:
            return
        self._count(old, usage)

    def remove(self, request: int) -> None:
        usage = self.requests.pop(request, None)
        if usage is not None:
            self._count(usage, None)

    def _count(self, old: ResourceUsage | None, new: ResourceUsage | None) -> None:
        """Subtract a request's `old` usage from the totals, and add its `new` usage."""
        for usage, sign in ((old, -1), (new, 1)):
            if usage is not None:
                self.num_sequences += sign * usage.num_sequences
                self.num_answers += sign * usage.num_answers
                self.num_blocks += sign * usage.num_blocks
        if self.queues_at_router and not self.num_sequences:
            # An idle worker may send no further report that would count these tokens.
            self.new_tokens = self.unseen_tokens = 0
        self._update_sort_keys()

    def update_load(self, load: WorkerLoad, now: float, is_shared: bool = False) -> None:
        """Update the view from a load report.

        Args:
            load: the report.
            now: the time, in seconds of the router's monotonic clock.
            is_shared: whether another worker of the machine computes as well.
        """
        if load.num_steps != self.load.num_steps:
            self.last_progress = now
            self.stuck = False
        has_prompts = load.prompt_seconds != self.load.prompt_seconds
        self.load = load
        self.prefill_rate.add(load)
        self.answer_rate.add(load, now, is_shared)
        self.backed_off_at = None
        # A load report does not include requests that arrived during its step.
        seen = not self.queues_at_router or load.running + load.queued >= self.num_sequences
        self.unseen_tokens = 0 if seen else self.new_tokens
        self.new_tokens = self.new_sequences = 0
        self._update_foreign()
        self._update_sort_keys()
        table = self._load_table
        if table is not None and (has_prompts or self._position < table.first_with_steps):
            self._update_speeds(table)

    def _update_sort_keys(self) -> None:
        """Precompute totals and sort keys, which each placement compares for all workers."""
        load, num_assigned, info = self.load, self.num_assigned, self.info
        # Prompt tokens that the worker must compute before it starts a new prompt.
        self.backlog_tokens = load.queued_tokens + self.new_tokens + self.unseen_tokens
        # Number of sequences on the worker, including those of other routers.
        busy = max(self.num_sequences, load.running + load.queued + self.new_sequences)
        self.num_busy = busy
        self.by_queue = (self.backlog_tokens, busy, num_assigned, self.name)
        filled = self.num_blocks / info.num_blocks
        self.by_utilization = (busy / info.max_sequences, filled, num_assigned, self.name)
        in_use = (self.num_blocks + self.num_foreign_blocks) * info.block_size
        reads = in_use + SEQUENCE_READS * busy
        self.by_cost = (self.backlog_tokens, reads, busy, self.assigned_tokens, self.name)
        if self._load_table is not None:
            self._update_row(self._load_table)

    def _update_row(self, table: LoadTable) -> None:
        row = self._row
        queued, reads, busy, assigned, _ = self.by_cost
        table.queued[row] = queued
        table.reads[row] = reads
        table.cost[row] = queued + KV_READ_COST * MAX_READS * reads
        table.delayed[row] = busy + 1
        table.ties[row] = busy * TIE_SCALE + assigned
        table.utilization[row], table.filled[row], table.num_assigned[row], _ = self.by_utilization
        if self.num_sequences:
            info = self.info
            taken = self.num_sequences + self.num_foreign_sequences
            table.free_sequences[row] = info.max_sequences - taken
            table.free_blocks[row] = info.num_blocks - self.num_blocks - self.num_foreign_blocks
        else:
            table.free_sequences[row] = table.free_blocks[row] = inf

    def _update_speeds(self, table: LoadTable) -> None:
        rate = self.prefill_rate
        if rate.is_calibrated:
            table.speed[self._row] = rate.tokens_per_second
            table.has_new_speeds = True
        table.uncached[self._row] = rate.uncached_fraction
        if self.answer_rate.is_calibrated:
            table.first_with_steps = min(table.first_with_steps, self._position)

    def _update_foreign(self) -> None:
        """Estimate the capacity that other routers use, from the last load report.

        Requests that this router has just dropped may count as those of another router until the
        next report.
        """
        load = self.load
        self.num_foreign_sequences = max(0, load.running + load.queued - self.num_sequences)
        taken = self.info.num_blocks - load.free_blocks - load.cached_blocks - load.leased_blocks
        self.num_foreign_blocks = (
            max(0, taken - self.num_blocks) if self.num_foreign_sequences else 0
        )


def check(view: WorkerView) -> None:
    """Assert that the totals of a view match its `requests`."""
    usages = [usage for usage in view.requests.values() if usage is not None]
    assert view.num_sequences == sum(usage.num_sequences for usage in usages)
    assert view.num_answers == sum(usage.num_answers for usage in usages)
    assert view.num_blocks == sum(usage.num_blocks for usage in usages)


def has_busy_peer(view: WorkerView, workers: Iterable[WorkerView]) -> bool:
    """Return whether another worker that shares the cores of `view` has sequences."""
    machine = view.info.machine
    if not machine:
        return False
    peers = workers.on_machine(machine) if isinstance(workers, Fleet) else workers
    return any(
        other.num_busy and other is not view and other.info.machine == machine for other in peers
    )
