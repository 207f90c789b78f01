"""A worker's placement group: requested from Ray, and again when a node of it dies."""

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

PLACEMENT_TIMEOUT_SECONDS = 60  # for Ray to grant resources that seem free
EXPLAIN_WAIT_SECONDS = 5  # before the report says what a worker waits for
SECONDS_NEAR = 20  # for nodes near the other workers, before any node is accepted


class Reservation:
    """The placement group of one worker, which successive processes of the worker use.

    When a node dies, Ray places the group again by itself, with the same labels. If the nodes near
    the other workers are full, Ray would wait forever, so `acquire` then drops that preference.

    Args:
        placement: name, bundles and labels of the worker.
        report: called with what the worker waits for.
    """

    def __init__(self, placement: WorkerPlacement, report: Report) -> None:
        self.group: PlacementGroup | None = None
        self._placement = placement
        self._report = report
        self._is_near = False

    async def acquire(self, wait_for_node: bool) -> None:
        """Wait until the group is placed; return at once if it still is.

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
            # One second at a time, since the thread cannot be cancelled.
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
        """Remove the group; Ray ends the processes in it."""
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
        """Return True if Ray has not placed the group, or not again since a node of it died."""
        assert self.group is not None
        found = await asyncio.to_thread(placement_group_table, self.group)
        return bool(found["state"] != "CREATED")

    def _report_progress(self, stage: str) -> None:
        self._report(self._placement.title, Progress(stage))

    def _describe_bundle(self) -> str:
        """Return the needs of a bundle as text that follows "no"."""
        amounts = (f"{what} {amount:g}" for what, amount in self._placement.bundles[0].items())
        node = f"node{with_labels(self._placement.selector(self._is_near))}"
        return f"{node} has {', '.join(amounts)}"
