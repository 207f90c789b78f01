"""Which of a pool's places for workers to fill and which to empty, to have as many as are wanted.

Pure: what fills each place and the number wanted in, what is to be done out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """What a place holds."""

    EMPTY = "empty"
    PENDING = "pending"  # a worker that does not serve yet, or not again yet
    SERVING = "serving"
    DRAINING = "leaving"  # one that drains; the place is not free before it has gone
    REASSIGNED = "lent"  # one that an operator gave another role: nobody but an operator ends it
    FAILED = "spoilt"  # its worker was given up: it is not filled again for a while


@dataclass(frozen=True, slots=True)
class PoolChanges:
    """Places to fill and to empty, by number; never both are asked for."""

    fill: Sequence[int] = ()
    drain: Sequence[int] = ()


def plan_changes(phases: Sequence[Phase], wanted: int, busy: Mapping[int, float]) -> PoolChanges:
    """What brings a pool to `wanted` workers, as far as it has places.

    What does not serve yet goes first, the newest of it; then whoever has least to do.

    Args:
        phases: of each place.
        wanted: workers, those that leave not counted.
        busy: how much the worker at a place has to do; one that is not named has nothing.
    """
    useful = [at for at, phase in enumerate(phases) if phase in (Phase.PENDING, Phase.SERVING)]
    if len(useful) <= wanted:
        empty = [at for at, phase in enumerate(phases) if phase is Phase.EMPTY]
        return PoolChanges(fill=empty[: wanted - len(useful)])
    useful.sort(key=lambda at: (phases[at] is Phase.SERVING, busy.get(at, 0.0), -at))
    return PoolChanges(drain=useful[: len(useful) - wanted])
