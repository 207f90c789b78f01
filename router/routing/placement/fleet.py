"""All workers of a router, with their loads as arrays if there are many."""

from collections.abc import Iterable
from typing import Generic, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from penstock.router.routing.prefix_cache.prefix_index import PrefixIndex

Rows: TypeAlias = npt.NDArray[np.intp]
NO_ROWS: Rows = np.zeros(0, np.intp)

MIN_ARRAY_WORKERS = 48
"""With fewer workers, a loop over them is faster than operations on arrays."""
TIE_SCALE = 1e10
"""More than the tokens that a worker ever computes, so that `ties` orders by sequences first."""


class LoadTable:
    """Loads of many workers as arrays [n + 1], by row; the last row belongs to no worker."""

    def __init__(self, num_workers: int) -> None:
        self.queued: npt.NDArray[np.float64] = np.zeros(num_workers + 1)  # tokens to compute
        self.queued[num_workers] = np.inf
        self.reads: npt.NDArray[np.float64] = np.zeros(
            num_workers + 1
        )  # by a decode step: see `by_cost`
        # Orders workers of equal cost: by sequences, then by tokens assigned so far.
        self.ties: npt.NDArray[np.float64] = np.zeros(num_workers + 1)

    def set(self, row: int, by_cost: tuple[int, int, int, int, str]) -> None:
        """Update a worker: (queued tokens, reads per step, sequences, assigned tokens, name)."""
        queued, reads, busy, assigned, _ = by_cost
        self.queued[row] = queued
        self.reads[row] = reads
        self.ties[row] = busy * TIE_SCALE + assigned


class View(Protocol):
    """The properties of a `WorkerView` that a fleet uses."""

    name: str
    role: str
    lost_at: float

    def set_load_table(self, table: LoadTable | None, row: int) -> None: ...


V = TypeVar("V", bound=View)


class Fleet(list[V], Generic[V]):
    """The workers of a router; replaced when a worker connects, is lost or changes its role.

    Rows number the workers in order of their names.
    """

    def __init__(self, views: Iterable[V]) -> None:
        super().__init__(views)
        self.by_row = sorted(self, key=lambda view: view.name)
        self.is_mixed = bool(self) and all(view.role == "mixed" for view in self)
        self.lost_at = max((view.lost_at for view in self), default=float("-inf"))
        self.loads = LoadTable(len(self)) if len(self) >= MIN_ARRAY_WORKERS else None
        for row, view in enumerate(self.by_row):
            view.set_load_table(self.loads, row)
        self._row_of = {view.name: row for row, view in enumerate(self.by_row)}
        # By index: its version and the row of each of its slots.
        self._rows: WeakKeyDictionary[PrefixIndex, tuple[int, Rows]] = WeakKeyDictionary()

    def rows_by_slot(self, index: PrefixIndex) -> Rows:
        """Return the row of each slot of an index; slots of other workers get the last row."""
        version, rows = self._rows.get(index, (-1, NO_ROWS))
        if version != index.version:
            unknown = len(self)
            rows = np.array([self._row_of.get(name, unknown) for name in index.workers], np.intp)
            self._rows[index] = (index.version, rows)
        return rows
