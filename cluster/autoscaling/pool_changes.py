"""Chooses the workers that a pool starts or drains to reach a given size.

This module does no I/O. A pool has a fixed list of placements. Each placement is empty or has one
worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """State of one placement of a pool."""

    EMPTY = "empty"
    PENDING = "pending"  # the worker of this placement is starting or restarting
    SERVING = "serving"
    # The worker is draining. The placement becomes empty when the worker exits.
    DRAINING = "leaving"
    REASSIGNED = "lent"  # an operator changed the role of the worker, so it is not drained
    # The worker could not be started. The placement is not used again for some time.
    FAILED = "spoilt"


@dataclass(frozen=True, slots=True)
class PoolChanges:
    """Indices of the placements to fill and to drain. At least one of the lists is empty."""

    fill: Sequence[int] = ()
    drain: Sequence[int] = ()


def plan_changes(phases: Sequence[Phase], wanted: int, busy: Mapping[int, float]) -> PoolChanges:
    """Return the changes that bring a pool to `wanted` workers or as close as possible.

    Workers that do not serve are drained first, then serving workers in order of increasing load.
    If several workers have equal load, the one with the highest index is drained first.

    Args:
        phases: state of each placement.
        wanted: number of starting and serving workers to reach.
        busy: load of the worker of each placement, by index. A missing load counts as 0.
    """
    useful = [at for at, phase in enumerate(phases) if phase in (Phase.PENDING, Phase.SERVING)]
    if len(useful) <= wanted:
        empty = [at for at, phase in enumerate(phases) if phase is Phase.EMPTY]
        return PoolChanges(fill=empty[: wanted - len(useful)])
    useful.sort(key=lambda at: (phases[at] is Phase.SERVING, busy.get(at, 0.0), -at))
    return PoolChanges(drain=useful[: len(useful) - wanted])
