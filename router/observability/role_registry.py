"""Roles that operators assigned to workers. The newest assignment of each worker counts.

Assignments can arrive at any router. The supervisor, which outlives the routers, merges them and
distributes the result, so that all routers get the same roles.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

ROLES = ("prefill", "decode", "mixed")


@dataclass(frozen=True, slots=True)
class Assignment:
    """A role that an operator assigned to a worker."""

    role: str
    at: float  # time of the assignment, in seconds since 1970
    by: str  # name of the operator's API key


Assignments = Mapping[str, Assignment]
"""Assignments by worker name."""


def merged(*sources: Assignments) -> dict[str, Assignment]:
    """Return the newest assignment of each worker.

    Assignments with the same time are ordered by role and then by key name; the last one counts.
    """
    newest: dict[str, Assignment] = {}
    for source in sources:
        for worker, assignment in source.items():
            other = newest.get(worker)
            if other is None or _order(other) < _order(assignment):
                newest[worker] = assignment
    return newest


def _order(assignment: Assignment) -> tuple[float, str, str]:
    return assignment.at, assignment.role, assignment.by


def successor(held: Assignment | None, role: str, now: float, by: str) -> Assignment:
    """Return an assignment of `role` that is newer than `held`.

    The time of the assignment is `now` (seconds since 1970). If `held` has a later time, from a
    clock that is ahead, the new time is just after that time.
    """
    at = now if held is None else max(now, math.nextafter(held.at, math.inf))
    return Assignment(role, at, by)


def covers(held: Assignments, given: Assignments) -> bool:
    """Return whether `held` has each assignment in `given`, or a newer one for the same worker."""
    return merged(held, given) == held


class RoleRegistry:
    """All role assignments, kept by the supervisor for its routers."""

    def __init__(self) -> None:
        self.assignments: Assignments = {}

    def merge(self, reported: Assignments) -> bool:
        """Merge a router's assignments; return True if the router already has all recorded ones."""
        self.record(reported)
        return self.assignments == reported

    def record(self, given: Assignments) -> None:
        """Add assignments; only the newest one of each worker is kept."""
        self.assignments = merged(self.assignments, given)
