"""Sends KV transfer moves from rank 0 to the other ranks, and the other ranks' reports to rank 0.

Moves are sent on the same channel as step plans and executed in order, so a rank reads a block only
after all steps that write it. Reports are sent over a communicator between the hosts of the ranks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from penstock.workers.kv_transfer.rank_mover import ReportCallback
from penstock.workers.kv_transfer.shards import LayerHeadRange
from penstock.workers.parallel.collectives import RankLost
from penstock.workers.parallel.communicator import Communicator
from penstock.workers.parallel.lazy_module import LazyModule
from penstock.workers.parallel.step_broadcast import RemoteReader, RemoteWriter

if TYPE_CHECKING:
    from penstock.protos import ranks_pb2 as wire
else:
    wire = LazyModule("penstock.protos.ranks_pb2")

log = logging.getLogger(__name__)


class OrderQueue:
    """Queues moves; a thread broadcasts them to all other ranks. `put` does not wait."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._orders: SimpleQueue[bytes] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, move: wire.Move) -> None:
        self._orders.put(wire.Order(move=move).SerializeToString())
        # A daemon thread that is never joined, because a lost rank may block it.
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="orders")
            self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._write(self._orders.get())
        except RankLost as error:
            # Only log the error, because the next step fails as well and ends the worker.
            log.info("stopped sending KV transfer moves to the other ranks: %s", error)


class RemoteRankMover:
    """Mover of a rank other than 0: sends moves to that rank and receives the rank's reports."""

    def __init__(
        self, rank: int, rectangle: LayerHeadRange, orders: OrderQueue, reports: RemoteReader
    ):
        self.rectangle = rectangle
        self._rank = rank
        self._orders = orders
        self._reports = reports

    def listen(self, on_report: ReportCallback) -> None:
        thread = threading.Thread(
            target=self._listen, args=(on_report,), daemon=True, name="reports"
        )
        thread.start()

    def execute(self, move: wire.Move) -> None:
        self._orders.put(move)

    def _listen(self, on_report: ReportCallback) -> None:
        try:
            while message := self._reports.read():
                on_report(wire.Report.FromString(message))
        except RankLost as error:  # only log the error, because the loss of a rank ends the worker
            log.info("the connection for the reports of rank %d was lost: %s", self._rank, error)


def make_remote_movers(
    rectangles: Sequence[LayerHeadRange], orders: OrderQueue, communicator: Communicator
) -> list[RemoteRankMover]:
    """Return the movers of all ranks except rank 0; `rectangles` has one entry per rank."""
    return [
        RemoteRankMover(rank, rectangles[rank], orders, RemoteReader(communicator, rank))
        for rank in range(1, len(rectangles))
    ]


class Reporter:
    """Sends the reports of a rank other than 0 to rank 0, from any thread."""

    def __init__(self, communicator: Communicator, seconds: float) -> None:
        self._writer = RemoteWriter(communicator, 0, seconds)
        self._lock = threading.Lock()
        self._lost = False

    def report(self, report: wire.Report) -> None:
        """Send a report. After a failed send, drop later reports, because each would time out."""
        with self._lock:
            if self._lost:
                return
            try:
                self._writer.write(report.SerializeToString())
            except RankLost as error:
                # Raise nothing, because the next step fails as well and ends this rank.
                self._lost = True
                log.warning("cannot send KV transfer reports to rank 0: %s", error)
