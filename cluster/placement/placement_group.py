"""Requests a worker's placement group from Ray, waits until it is placed, and releases it."""

import asyncio

from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from penstock.cluster.placement.placement_plan import (
    PlacementError,
    WorkerPlacement,
    describe_free,
    with_labels,
)
from penstock.cluster.ray_session import free_nodes
from penstock.cluster.status.status_events import Progress, Report

PLACEMENT_TIMEOUT_SECONDS = 60  # time limit for Ray to place a group whose resources seem free
EXPLAIN_WAIT_SECONDS = 5  # after this wait, the progress report names the missing resources
# Time to wait for nodes with the preferred labels; afterwards, any node is accepted.
SECONDS_NEAR = 20


class Reservation:
    """The placement group of one worker, which all successive processes of the worker use.

    When a node dies, Ray places the group again by itself, with the same labels. Ray treats the
    preferred labels as required, so it would wait forever if the nodes with these labels are full.
    `acquire` therefore replaces the group after `SECONDS_NEAR` by a group without the preferred
    labels.

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
        """Create the placement group if it does not exist, and wait until Ray has placed it.

        Args:
            wait_for_node: whether to wait without a time limit.

        Raises:
            PlacementError: Ray did not place the group within the time limit.
        """
        group = self.group
        if group is None:
            self._report_progress("waiting for resources")
            group = self._create_group(near=bool(self._placement.near))
        elif await self.is_lost():
            self._report_progress("waiting for resources again")
        waited = 0
        while wait_for_node or waited < PLACEMENT_TIMEOUT_SECONDS:
            # Wait for only one second per call, because a waiting thread cannot be cancelled.
            if await asyncio.to_thread(group.wait, 1):
                return
            waited += 1
            if waited == EXPLAIN_WAIT_SECONDS:
                self._report_progress(f"waiting for resources: no {self._describe_bundle()} free")
            if self._is_near and waited >= SECONDS_NEAR:
                self._report_progress("no room near the other workers: accepting any node")
                self.release()
                group = self._create_group(near=False)
        raise PlacementError(
            f"Ray has no room for {self._placement.title}: no {self._describe_bundle()}; "
            f"{describe_free(free_nodes(), self._placement.labels)}"
        )

    def release(self) -> None:
        """Remove the placement group. Ray then ends the processes in the group."""
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
        """Return True if the placement group is not completely placed.

        Ray has then not placed it yet, or one of its nodes has died.
        """
        assert self.group is not None
        found = await asyncio.to_thread(placement_group_table, self.group)
        return bool(found["state"] != "CREATED")

    def _report_progress(self, stage: str) -> None:
        self._report(self._placement.title, Progress(stage))

    def _describe_bundle(self) -> str:
        """Return the resources of a bundle as text like "node with a=b has CPU 4, GPU 1"."""
        amounts = (f"{what} {amount:g}" for what, amount in self._placement.bundles[0].items())
        node = f"node{with_labels(self._placement.selector(self._is_near))}"
        return f"{node} has {', '.join(amounts)}"
