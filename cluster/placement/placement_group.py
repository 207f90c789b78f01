"""Requests a worker's placement group from Ray, waits for its placement and releases it."""

import asyncio

from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from penstock.cluster.placement.placement import (
    PlacementError,
    WorkerPlacement,
    describe_free,
    with_labels,
)
from penstock.cluster.ray_session import free_nodes
from penstock.cluster.status.status_events import Progress, Report

PLACEMENT_TIMEOUT_SECONDS = 60  # time limit for Ray to grant resources that seem free
EXPLAIN_WAIT_SECONDS = 5  # after this wait, report which resources are missing
SECONDS_NEAR = 20  # wait this long for nodes near other workers, then accept any node


class Reservation:
    """The placement group of one worker; successive processes of the worker reuse the group.

    When a node dies, Ray places the group again by itself, with the same labels. Ray treats the
    preferred labels as required and would wait forever if those nodes are full. `acquire` therefore
    replaces the group by one without the preferred labels after `SECONDS_NEAR`.

    Args:
        placement: name, bundles and labels of the worker.
        report: called with progress events while the worker waits.
    """

    def __init__(self, placement: WorkerPlacement, report: Report) -> None:
        self.group: PlacementGroup | None = None
        self._placement = placement
        self._report = report
        self._is_near = False

    async def acquire(self, wait_for_node: bool) -> None:
        """Create the group if there is none, and wait until Ray has placed the group.

        Args:
            wait_for_node: wait without a time limit.

        Raises:
            PlacementError: the group was not placed in time.
        """
        group = self.group
        if group is None:
            self._report_progress("waiting for its place")
            group = self._create_group(near=bool(self._placement.near))
        elif await self.is_lost():
            self._report_progress("waiting for its place again")
        waited = 0
        while wait_for_node or waited < PLACEMENT_TIMEOUT_SECONDS:
            # Wait one second per call, because the waiting thread cannot be cancelled.
            if await asyncio.to_thread(group.wait, 1):
                return
            waited += 1
            if waited == EXPLAIN_WAIT_SECONDS:
                self._report_progress(f"waiting for its place: no {self._describe_bundle()} free")
            if self._is_near and waited >= SECONDS_NEAR:
                self._report_progress("no room near the other workers: accepting any node")
                self.release()
                group = self._create_group(near=False)
        raise PlacementError(
            f"Ray has no room for {self._placement.title}: no {self._describe_bundle()}; "
            f"{describe_free(free_nodes(), self._placement.labels)}"
        )

    def release(self) -> None:
        """Remove the group; Ray then ends the processes in the group."""
        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None

    def _create_group(self, near: bool) -> PlacementGroup:
        placement = self._placement
        selector = placement.selector(near)
        self._is_near = near
        group = placement_group(
            list(placement.bundles),
            placement.strategy,
            bundle_label_selector=[selector] * placement.pp if selector else None,
        )
        self.group = group
        return group

    async def is_lost(self) -> bool:
        """Return True if the group is not placed: not yet, or not again after a node died."""
        assert self.group is not None
        found = await asyncio.to_thread(placement_group_table, self.group)
        return bool(found["state"] != "CREATED")

    def _report_progress(self, stage: str) -> None:
        self._report(self._placement.title, Progress(stage))

    def _describe_bundle(self) -> str:
        """Return the needs of a bundle as text like "node with a=b has CPU 4, GPU 1"."""
        amounts = (f"{what} {amount:g}" for what, amount in self._placement.bundles[0].items())
        node = f"node{with_labels(self._placement.selector(self._is_near))}"
        return f"{node} has {', '.join(amounts)}"
