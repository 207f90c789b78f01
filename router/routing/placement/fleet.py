"""All workers of a router, with their loads as arrays."""

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.router.routing.events import WorkerInfo
from penstock.router.routing.prefix_cache.worker_slots import WorkerSlots

Rows: TypeAlias = npt.NDArray[np.intp]
Floats: TypeAlias = npt.NDArray[np.float64]

TIE_SCALE = 1e10
"""More than the tokens that a worker ever computes, so that `ties` orders by sequences first."""

KV_READ_COST = 4e-4
"""Cost of reading one token of KV in one decode step, relative to computing one prompt token."""
MAX_READS = 256
"""Maximum number of decode steps that count: answers are usually shorter than allowed."""


class LoadTable:
    """Loads of all workers as arrays [n + 1], by row; the last row belongs to no worker.

    Each `WorkerView` keeps its row current.
    """

    def __init__(self, num_workers: int) -> None:
        def zeros() -> Floats:
            column = np.zeros(num_workers + 1)
            column[num_workers] = np.inf  # never the least
            return column

        self.queued = zeros()  # prompt tokens to compute
        self.reads = np.zeros(
            num_workers + 1
        )  # KV tokens that a decode step reads: see `WorkerView.by_cost`
        self.cost = zeros()  # `queued` and the cost of `reads` for the longest answers
        self.busy = zeros()  # sequences
        self.ties = zeros()  # orders workers of equal cost: by sequences, then by assigned tokens
        self.utilization = zeros()  # fraction of the sequences
        self.filled = zeros()  # fraction of the blocks
        self.num_assigned = zeros()  # requests
        self.free_sequences = zeros()  # +inf: any request has room
        self.free_blocks = zeros()
        self.speed = np.zeros(num_workers + 1)  # prompt tokens per second; 0: not measured
        self.uncached = np.ones(num_workers + 1)  # fraction of the prompt tokens
        self.first_with_steps = num_workers  # smallest position of a worker with measured steps


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


class Fleet(list[V], Generic[V]):
    """The workers of a router; replaced when a worker connects, is lost or changes its role.

    Rows number the workers in order of their names. A *bar* is an array [n + 1] with 0 in the rows
    of some workers and infinity in all others; None stands for the bar of all workers.
    """

    def __init__(self, views: Iterable[V]) -> None:
        super().__init__(views)
        self.by_row = sorted(self, key=lambda view: view.name)
        self._row_of = {view.name: row for row, view in enumerate(self.by_row)}
        self.lost_at = np.array([*(view.lost_at for view in self.by_row), -np.inf])
        self.last_lost_at = float(self.lost_at.max())
        self.loads = LoadTable(len(self))
        for position, view in enumerate(self):
            view.set_load_table(self.loads, self._row_of[view.name], position)
        self.block_sizes = np.array(
            [*(view.info.block_size for view in self.by_row), 1], np.float64
        )
        # The rows and the bar of each group: see `candidates.Group`.
        roles = [view.role for view in self.by_row]
        self.rows_of: dict[str, Sequence[int]] = {
            "all": range(len(self)),
            "prompt": [row for row, role in enumerate(roles) if role != "decode"],
            "answer": [row for row, role in enumerate(roles) if role != "prefill"],
            "prefill": [row for row, role in enumerate(roles) if role == "prefill"],
        }
        self.bars = {
            group: None if len(rows) == len(self) else self._bar(rows)
            for group, rows in self.rows_of.items()
        }
        # Answers move away from a prefill worker whose role an operator assigned.
        self.kept_bar = self._bar(
            [row for row in self.rows_of["prefill"] if not self.by_row[row].is_shedding]
        )
        self._peers: dict[str, list[V]] = {}  # workers by machine; "" is no machine
        for view in self:
            if view.info.machine:
                self._peers.setdefault(view.info.machine, []).append(view)
        # The row of each slot, for one object of slots at one version.
        self._slots: tuple[WorkerSlots | None, int] = (None, -1)
        self._row_list: list[int] = []
        self._rows: Rows = np.zeros(0, np.intp)

    def _bar(self, rows: Sequence[int]) -> Floats:
        bar = np.full(len(self) + 1, np.inf)
        bar[list(rows)] = 0.0
        return bar

    def row(self, worker: str) -> int:
        """Return the row of a worker; unknown workers have the last row."""
        return self._row_of.get(worker, len(self))

    def on_machine(self, machine: str) -> Sequence[V]:
        """Return the workers that share the cores of a machine."""
        return self._peers.get(machine, ())

    def row_list(self, slots: WorkerSlots) -> list[int]:
        """Return the row of each slot; slots of other workers have the last row."""
        if self._slots != (slots, slots.version):
            self._slots = (slots, slots.version)
            self._row_list = [self.row(name) for name in slots.names]
            self._rows = np.array(self._row_list, np.intp)
        return self._row_list

    def rows_by_slot(self, slots: WorkerSlots) -> Rows:
        """Return `row_list` as an array."""
        self.row_list(slots)
        return self._rows

    @property
    def mean_speed(self) -> float:
        """Mean prompt tokens per second of the workers with a measured speed; 0: there are none."""
        return mean_speed(self.loads.speed)

    @property
    def first_with_steps(self) -> V | None:
        """The first worker whose decode steps have been measured, or None."""
        position = self.loads.first_with_steps
        return self[position] if position < len(self) else None


def mean_speed(speeds: Floats) -> float:
    """Return the mean of the speeds that are not 0; 0 if all are."""
    num = int(np.count_nonzero(speeds))
    return float(speeds.sum()) / num if num else 0.0
