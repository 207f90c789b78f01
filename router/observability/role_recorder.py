"""Role changes at one router. A role change takes effect once the supervisor has recorded it.

The supervisor outlives its routers, so a recorded role is kept if the router exits.
"""

import asyncio
import time
from collections.abc import Callable, Collection

from penstock.router.errors import Code, ServingError, invalid
from penstock.router.observability.role_registry import (
    ROLES,
    Assignment,
    Assignments,
    covers,
    merged,
    successor,
)

SECONDS_TO_RECORD = 10.0
RETRY_SECONDS = 2.0


class RoleRecorder:
    """The roles that operators gave to workers, as this router knows them.

    Args:
        on_change: called with worker and role for each role that takes effect.
    """

    def __init__(self, on_change: Callable[[str, str], None]) -> None:
        self.assignments: Assignments = {}
        # Sends an assignment to the supervisor. The supervisor later confirms it by a call of
        # `merge`. Without a supervisor, the value is None and roles take effect immediately.
        self.send: Callable[[str, Assignment], None] | None = None
        self._on_change = on_change
        # Event for those who wait for the next merge. Each merge sets it and makes a new one.
        self._updated = asyncio.Event()

    def merge(self, assignments: Assignments) -> None:
        """Merge the supervisor's assignments into `assignments`; keep the newest of each worker."""
        before, self.assignments = self.assignments, merged(self.assignments, assignments)
        for worker, assignment in self.assignments.items():
            if before.get(worker) != assignment:
                self._on_change(worker, assignment.role)
        self._updated.set()
        self._updated = asyncio.Event()

    async def assign(self, worker: str, role: str, workers: Collection[str], by: str) -> None:
        """Check an operator's assignment, then `record` it; `workers` are the known workers.

        Raises:
            ServingError: INVALID for an unknown role, NOT_FOUND for an unknown worker,
                UNAVAILABLE if the supervisor does not confirm the role.
        """
        if role not in ROLES:
            raise invalid(f"unknown role {role[:80]!r}: use one of {', '.join(ROLES)}", "role")
        if worker not in workers:
            names = ", ".join(sorted(workers)) or "none"
            raise ServingError(
                Code.NOT_FOUND, f"unknown worker {worker[:80]!r}: known workers: {names}", "worker"
            )
        await self.record(worker, role, by)

    async def record(self, worker: str, role: str, by: str) -> None:
        """Assign a role to a worker, and wait until the supervisor has recorded the role.

        `by` is the name of the operator's key.

        Raises:
            ServingError: UNAVAILABLE if no confirmation arrives within SECONDS_TO_RECORD.
        """
        assignment = successor(self.assignments.get(worker), role, time.time(), by)
        given = {worker: assignment}
        if self.send is None:
            self.merge(given)
            return
        self.send(worker, assignment)
        try:
            async with asyncio.timeout(SECONDS_TO_RECORD):
                while not covers(self.assignments, given):
                    await self._updated.wait()
        except TimeoutError:
            raise ServingError(
                Code.UNAVAILABLE,
                f"the role was not recorded: the supervisor did not confirm it within "
                f"{SECONDS_TO_RECORD:g} s. Send the request again (GET /status shows the role of "
                "each worker)",
                retry_after=RETRY_SECONDS,
            ) from None
