"""Chooses the workers that a pool starts or drains to reach a wanted number. Pure code, no I/O.

A pool has a fixed list of placements; each placement is empty or has one worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """State of one placement of a pool."""

    EMPTY = "empty"
    PENDING = "pending"  # its worker is starting or restarting
    SERVING = "serving"
    DRAINING = "leaving"  # its worker is draining; the placement is free after the worker's exit
    REASSIGNED = "lent"  # an operator changed its worker's role; the worker is not drained
    FAILED = "spoilt"  # its worker could not be started; not used again for some time


@dataclass(frozen=True, slots=True)
class PoolChanges:
    """Indices of the placements to fill and to drain; at least one of these lists is empty."""

    fill: Sequence[int] = ()
    drain: Sequence[int] = ()


def plan_changes(phases: Sequence[Phase], wanted: int, busy: Mapping[int, float]) -> PoolChanges:
    """Return the changes that bring a pool to `wanted` workers or as close as possible.

    Workers that do not serve are drained first, then serving workers in order of increasing load;
    among workers with equal load, the worker with the highest index is drained first.

    Args:
        phases: state of each placement.
        wanted: number of pending and serving workers to reach.
        busy: placement index to load of its worker; 0 if missing.
    """
    useful = [at for at, phase in enumerate(phases) if phase in (Phase.PENDING, Phase.SERVING)]
    if len(useful) <= wanted:
        empty = [at for at, phase in enumerate(phases) if phase is Phase.EMPTY]
        return PoolChanges(fill=empty[: wanted - len(useful)])
    useful.sort(key=lambda at: (phases[at] is Phase.SERVING, busy.get(at, 0.0), -at))
    return PoolChanges(drain=useful[: len(useful) - wanted])
