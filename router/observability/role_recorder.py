"""Role changes at one router: each takes effect once the supervisor has recorded it.

The supervisor outlives its routers, so a recorded role outlives the router that received it.
"""

import asyncio
import time
from collections.abc import Callable

from penstock.router.errors import Code, ServingError
from penstock.router.observability.role_registry import (
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
        # Sends an assignment to the supervisor, which calls `merge` once it has recorded it.
        # None if no supervisor runs this router: roles then take effect at once.
        self.send: Callable[[str, Assignment], None] | None = None
        self._on_change = on_change
        self._updated = asyncio.Event()  # replaced whenever `assignments` changes

    def merge(self, assignments: Assignments) -> None:
        """Merge in assignments that the supervisor holds; the newest one of each worker counts."""
        before, self.assignments = self.assignments, merged(self.assignments, assignments)
        for worker, assignment in self.assignments.items():
            if before.get(worker) != assignment:
                self._on_change(worker, assignment.role)
        self._updated.set()
        self._updated = asyncio.Event()

    async def record(self, worker: str, role: str) -> None:
        """Give a worker a role, and return once the supervisor holds it.

        Raises UNAVAILABLE if the supervisor does not confirm within SECONDS_TO_RECORD.
        """
        assignment = successor(self.assignments.get(worker), role, time.time())
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
