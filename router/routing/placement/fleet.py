"""All workers of a router, with their loads as arrays."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.router.routing.events import WorkerInfo
from penstock.router.routing.prefix_cache.worker_slots import Workers, WorkerSlots

Floats: TypeAlias = npt.NDArray[np.float64]

GROUPS: Mapping[str, tuple[int, int]] = {
    "all": (0, 4),
    "prompt": (0, 3),
    "answer": (2, 4),
    "prefill": (0, 2),
    "kept": (1, 2),
}
"""For each group of workers, its first kind and the kind after its last kind.

Groups are explained at `candidates.Group`, and kinds at `_kind`.
"""

TIE_SCALE = 1e10
"""A number above all token counts of workers, so that `ties` orders by sequences first."""

KV_READ_COST = 4e-4
"""Cost of reading one token of KV in one decode step, relative to computing one prompt token."""
MAX_READS = 256
"""Maximum number of decode steps in a cost, because answers are usually shorter than allowed."""


class LoadTable:
    """Loads of all workers as arrays [n], by row. Each `WorkerView` updates its own row."""

    def __init__(self, num_workers: int) -> None:
        columns = np.zeros((12, num_workers))
        self.queued = columns[0]  # queued prompt tokens
        self.reads = columns[1]  # cost of a decode step, in KV tokens read (`WorkerView.by_cost`)
        # Cost in prompt tokens: `queued`, plus `reads` for each of `MAX_READS` decode steps.
        self.cost = columns[2]
        # Sequences that a new prompt would delay: those on the worker, and the prompt's own.
        self.delayed = columns[3]
        # Ranks workers of equal cost by their sequences, then by their assigned tokens.
        self.ties = columns[4]
        self.utilization = columns[5]  # fraction of the sequence slots in use
        self.filled = columns[6]  # fraction of the blocks in use
        self.num_assigned = columns[7]  # requests that this router has assigned to the worker
        self.free_sequences = columns[8]  # free sequence slots; infinite without a limit
        self.free_blocks = columns[9]
        self.speed = columns[10]  # prompt tokens per second; 0 if not measured
        self.uncached = columns[11]  # fraction of the prompt tokens that are not cached
        self.uncached[:] = 1.0
        # Lowest index in the fleet of a worker with measured steps.
        self.first_with_steps = num_workers
        self.has_new_speeds = True  # whether a speed has changed since `Fleet.speeds` was computed

    def rows(self, rows: slice) -> "LoadTable":
        """Return a table of consecutive rows that shares the memory of this table."""
        part = LoadTable(0)
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(part, name, column[rows])
        return part


class View(Protocol):
    """The properties of a `WorkerView` that a fleet uses."""

    info: WorkerInfo
    name: str
    role: str
    lost_at: float

    @property
    def is_shedding(self) -> bool: ...

    def set_load_table(self, table: LoadTable, row: int, position: int) -> None: ...


V = TypeVar("V", bound=View)


class WorkerGroup(Generic[V]):
    """The workers of consecutive rows of a fleet.

    Attributes:
        start: the first row.
        views: the workers.
        loads: their loads.
        ranks: position of each worker in the order of the names.
        is_by_name: whether the group is not empty and its rows are ordered by worker name.
        layouts: the layouts of their KV blocks.
        block_sizes: number of tokens per block of each worker.
        mask: bit mask of the workers' slots; set by `Fleet.use_slots`.
    """

    def __init__(self, fleet: "Fleet[V]", start: int, stop: int) -> None:
        self.start = start
        self.views = fleet.by_row[start:stop]
        self.loads = fleet.loads.rows(slice(start, stop))
        self.ranks = fleet.ranks[start:stop]
        self.is_by_name = start < stop and bool((np.diff(self.ranks) > 0).all())
        self.layouts = np.array([view.info.layout for view in self.views])
        self.block_sizes = np.array([view.info.block_size for view in self.views], np.float64)
        self.mask: Workers = 0


class Fleet(list[V], Generic[V]):
    """The workers of a router.

    A new fleet is made when a worker connects, is lost or changes its role. Rows are ordered by the
    kinds of the workers (see `_kind`), and within a kind by name.
    """

    def __init__(self, views: Iterable[V]) -> None:
        super().__init__(views)
        self.by_row = sorted(self, key=lambda view: (_kind(view), view.name))
        self._row_of = {view.name: row for row, view in enumerate(self.by_row)}
        self._by_name = np.array([self._row_of[name] for name in sorted(self._row_of)], np.intp)
        self.ranks = np.empty(len(self))
        self.ranks[self._by_name] = np.arange(len(self))
        self.lost_at = np.array([view.lost_at for view in self.by_row])
        self.last_lost_at = float(self.lost_at.max(initial=-np.inf))
        self.loads = LoadTable(len(self))
        for position, view in enumerate(self):
            view.set_load_table(self.loads, self._row_of[view.name], position)
        kinds = [_kind(view) for view in self.by_row]
        self.groups = {
            group: WorkerGroup(self, bisect_left(kinds, first), bisect_left(kinds, end))
            for group, (first, end) in GROUPS.items()
        }
        # Workers that share cores, by machine. Workers whose `machine` is empty share no cores.
        self._peers: dict[str, list[V]] = {}
        for view in self:
            if view.info.machine:
                self._peers.setdefault(view.info.machine, []).append(view)
        # Slots for which the rows were computed, and the version of these slots.
        self._slots: tuple[WorkerSlots | None, int] = (None, -1)
        self._rows_of_slots: list[int] = []
        self._mean_speed = 0.0
        self._speeds: Floats = self.loads.speed

    def row(self, worker: str) -> int:
        """Return the row of a worker."""
        return self._row_of[worker]

    def on_machine(self, machine: str) -> Sequence[V]:
        """Return the workers that share the cores of a machine."""
        return self._peers.get(machine, ())

    def use_slots(self, slots: WorkerSlots) -> list[int]:
        """Return the row of each slot, and set `WorkerGroup.mask`.

        The row is -1 if this fleet does not have the slot's worker.
        """
        if self._slots != (slots, slots.version):
            self._slots = (slots, slots.version)
            self._rows_of_slots = [self._row_of.get(name, -1) for name in slots.names]
            for group in self.groups.values():
                rows = range(group.start, group.start + len(group.views))
                group.mask = sum(
                    1 << slot for slot, row in enumerate(self._rows_of_slots) if row in rows
                )
        return self._rows_of_slots

    @property
    def mean_speed(self) -> float:
        """Mean prompt tokens per second of the workers with a measured speed, or 0 without any."""
        if self.loads.has_new_speeds:
            self._update_speeds()
        return self._mean_speed

    @property
    def speeds(self) -> Floats:
        """Prompt tokens per second by row. Workers without a measured speed have the mean speed."""
        if self.loads.has_new_speeds:
            self._update_speeds()
        return self._speeds

    def _update_speeds(self) -> None:
        measured = self.loads.speed
        self._mean_speed = mean_speed(measured[self._by_name])
        self._speeds = np.where(measured > 0.0, measured, self._mean_speed)
        self.loads.has_new_speeds = False

    @property
    def first_with_steps(self) -> V | None:
        """The first worker whose decode steps have been measured, or None."""
        position = self.loads.first_with_steps
        return self[position] if position < len(self) else None


def _kind(view: View) -> int:
    """Return a number for the role of a worker.

    The number is 0 or 1 for prefill workers, 2 for mixed workers and 3 for decode workers. It is 0
    if an operator made the worker a prefill worker; answers move away from such workers.
    """
    if view.role == "prefill":
        return 0 if view.is_shedding else 1
    return 3 if view.role == "decode" else 2


def mean_speed(speeds: Floats) -> float:
    """Return the mean of the speeds that are not 0, or 0 if all are 0."""
    num = int(np.count_nonzero(speeds))
    return float(speeds.sum()) / num if num else 0.0
