"""Simulates a large cluster as cells that run in parallel.

Each cell has its own router and workers.
"""

import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from multiprocessing import get_context

from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.simulator.scaling.call import Call
from penstock.loadtests.simulator.scaling.cluster import Cluster, ClusterPlan, Sample
from penstock.loadtests.simulator.scaling.goals import Figures, figures_of
from penstock.loadtests.simulator.scaling.scalers import Static


@dataclass(frozen=True, slots=True)
class Cell:
    """The results of one cell."""

    calls: Sequence[Call]
    samples: Sequence[Sample]
    seconds: float  # virtual time at the end of the cell, in seconds
    worker_seconds: float
    busy_seconds: float
    num_steps: int
    num_events: int
    cpu_seconds: float


def run_cells(plan: ClusterPlan, load: Sequence[Planned], num: int) -> list[Cell]:
    """Split workers and load evenly among `num` cells, and run each cell in its own process.

    The workers of each role must be divisible by `num`. Request i goes to cell i modulo `num`.
    Raises RuntimeError if requests never end, and OSError if a process dies.
    """
    cell_plan = replace(plan, pools={role: count // num for role, count in plan.pools.items()})
    loads = [load[first::num] for first in range(num)]
    if num == 1:
        return [run_cell(cell_plan, loads[0])]
    deaf = (signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the other processes
    with ProcessPoolExecutor(num, get_context("spawn"), signal.signal, deaf) as executor:
        try:
            return list(executor.map(partial(run_cell, cell_plan), loads))
        except BrokenProcessPool:
            raise OSError("a simulation process died") from None


def run_cell(plan: ClusterPlan, load: Sequence[Planned]) -> Cell:
    """Simulate one cell with a fixed number of workers."""
    started = time.process_time()
    cluster = Cluster(plan, load, Static(plan.pools))
    cluster.run()
    return Cell(
        cluster.calls,
        cluster.samples,
        cluster.clock.now,
        cluster.worker_seconds,
        cluster.busy_seconds,
        cluster.num_steps,
        cluster.clock.num_events,
        time.process_time() - started,
    )


def figures_of_cells(cells: Sequence[Cell], plan: ClusterPlan) -> Figures:
    """Summarize all cells as one cluster. A cell's workers cost time until the cell ends."""
    return figures_of(
        list(chain.from_iterable(cell.calls for cell in cells)),
        plan,
        worker_seconds=sum(cell.worker_seconds for cell in cells),
        busy_seconds=sum(cell.busy_seconds for cell in cells),
        most_workers=sum(plan.pools.values()),
        scalings_an_hour=0.0,
    )


def about_cells(cells: Sequence[Cell], seconds: float) -> str:
    """Return one line about the size of a simulation that took `seconds`."""
    computed = ", ".join(f"{cell.cpu_seconds:.1f} s" for cell in cells)
    return (
        f"{sum(len(cell.calls) for cell in cells)} requests, "
        f"{max(cell.seconds for cell in cells):.0f} s, simulated in {seconds:.1f} s: "
        f"{sum(cell.num_steps for cell in cells)} steps, "
        f"{sum(cell.num_events for cell in cells)} events; CPU time of each cell: {computed}"
    )
