"""A worker's place in the cluster: asked of Ray, waited for, asked for anew where its node dies."""

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

PLACEMENT_TIMEOUT_SECONDS = 60  # for Ray to grant what is free
EXPLAIN_WAIT_SECONDS = 5  # what a worker waits for
SECONDS_NEAR = 20  # for a place near the other workers, before any will do


class Reservation:
    """A placement group. Its processes follow each other in it.

    Ray lays a group whose node died anew by itself, with the labels that it was asked with: where
    the nodes near the others are full it would wait for ever.

    Args:
        place: who it is for, and what it holds.
        report: told what is waited for.
    """

    def __init__(self, placement: WorkerPlacement, report: Report) -> None:
        self.group: PlacementGroup | None = None
        self._placement = placement
        self._report = report
        self._is_near = False

    async def acquire(self, wait_for_node: bool) -> None:
        """Returns once it is there, at once where it still is. `PlacementError`, unless patient."""
        group = self.group
        if group is None:
            self._report_progress("waiting for its place")
            group = self._create_group(near=bool(self._placement.near))
        elif await self.is_lost():
            self._report_progress("waiting for its place again")
        waited = 0
        while wait_for_node or waited < PLACEMENT_TIMEOUT_SECONDS:
            # A second at a time: a thread cannot be cancelled.
            if await asyncio.to_thread(group.wait, 1):
                return
            waited += 1
            if waited == EXPLAIN_WAIT_SECONDS:
                self._report_progress(f"waiting for its place: no {self._describe_bundle()} free")
            if self._is_near and waited >= SECONDS_NEAR:
                self._report_progress("no room near the others: any node will do")
                self.release()
                group = self._create_group(near=False)
        raise PlacementError(
            f"Ray has no room for {self._placement.title}: no {self._describe_bundle()}; "
            f"{describe_free(free_nodes(), self._placement.labels)}"
        )

    def release(self) -> None:
        """Give it back; what runs there ends."""
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
        """Whether Ray says that it has been granted no node, or no other than one that died."""
        assert self.group is not None
        found = await asyncio.to_thread(placement_group_table, self.group)
        return bool(found["state"] != "CREATED")

    def _report_progress(self, stage: str) -> None:
        self._report(self._placement.title, Progress(stage))

    def _describe_bundle(self) -> str:
        """What one of its bundles asks for, in words."""
        amounts = (f"{what} {amount:g}" for what, amount in self._placement.bundles[0].items())
        node = f"node{with_labels(self._placement.selector(self._is_near))}"
        return f"{node} has {', '.join(amounts)}"
