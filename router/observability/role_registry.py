"""The roles that operators gave to workers: who said what, when; the last word counts everywhere.

Several routers may each be told something, and the supervisor outlives them all: what they know
is merged, so that in the end all say the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

ROLES = ("prefill", "decode", "mixed")


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker was made."""

    role: str
    at: float  # seconds since 1970


Assignments = Mapping[str, Assignment]
"""By worker."""


def merged(*sources: Assignments) -> dict[str, Assignment]:
    """The last word on each worker; of two at one time the same one wherever they are merged."""
    newest: dict[str, Assignment] = {}
    for source in sources:
        for worker, assignment in source.items():
            other = newest.get(worker)
            if other is None or (other.at, other.role) < (assignment.at, assignment.role):
                newest[worker] = assignment
    return newest


def successor(held: Assignment | None, role: str, now: float) -> Assignment:
    """Return an assignment of `role` that is newer than `held`, also where the clock that stamped
    `held` was ahead of `now` (seconds since 1970)."""
    return Assignment(role, now if held is None else max(now, math.nextafter(held.at, math.inf)))


def covers(held: Assignments, given: Assignments) -> bool:
    """Return whether `held` contains every assignment of `given`, or a newer one of its worker."""
    return merged(held, given) == held


class RoleRegistry:
    """All that was said so far, kept by the supervisor for its routers."""

    def __init__(self) -> None:
        self.assignments: Assignments = {}

    def merge(self, reported: Assignments) -> bool:
        """What one router knows. False: it lacks something that another one was told."""
        self.record(reported)
        return self.assignments == reported

    def record(self, given: Assignments) -> None:
        """Add assignments; the newest one of each worker is kept."""
        self.assignments = merged(self.assignments, given)
