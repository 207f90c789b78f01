"""Choice of the workers that a pool starts or drains to reach a wanted number. Pure.

A pool has a fixed list of placements, each empty or with one worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """State of one placement of a pool."""

    EMPTY = "empty"
    PENDING = "pending"  # has a worker that does not serve, or not again yet
    SERVING = "serving"
    DRAINING = "leaving"  # its worker drains; not free before that has exited
    REASSIGNED = "lent"  # an operator changed its worker's role: the autoscaler keeps it
    FAILED = "spoilt"  # its worker was given up; not filled again for a while


@dataclass(frozen=True, slots=True)
class PoolChanges:
    """Placements to fill or to drain, by index; at least one of the two is empty."""

    fill: Sequence[int] = ()
    drain: Sequence[int] = ()


def plan_changes(phases: Sequence[Phase], wanted: int, busy: Mapping[int, float]) -> PoolChanges:
    """Return the changes that bring a pool to `wanted` workers, as far as it has placements.

    Workers that do not serve yet are drained first, then those with the least load; of equals, the
    one with the highest index.

    Args:
        phases: state of each placement.
        wanted: number of pending and serving workers to reach.
        busy: load of the worker at each placement; missing: 0.
    """
    useful = [at for at, phase in enumerate(phases) if phase in (Phase.PENDING, Phase.SERVING)]
    if len(useful) <= wanted:
        empty = [at for at, phase in enumerate(phases) if phase is Phase.EMPTY]
        return PoolChanges(fill=empty[: wanted - len(useful)])
    useful.sort(key=lambda at: (phases[at] is Phase.SERVING, busy.get(at, 0.0), -at))
    return PoolChanges(drain=useful[: len(useful) - wanted])
