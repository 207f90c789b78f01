"""The other ranks of a worker, as its leading rank has them move blocks; and what they answer.

They are told in the same line as step plans, and obey in order: so one reads a block after every
step that was to write it. What came of it goes back over a communicator of the hosts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from penstock.workers.kv_transfer.rank_mover import ReportCallback
from penstock.workers.kv_transfer.shards import LayerHeadRange
from penstock.workers.parallel.communicator import Communicator
from penstock.workers.parallel.groups import RankLost
from penstock.workers.parallel.lazy_module import LazyModule
from penstock.workers.parallel.step_broadcast import RemoteReader, RemoteWriter

if TYPE_CHECKING:
    from penstock.protos import ranks_pb2 as wire
else:
    wire = LazyModule("penstock.protos.ranks_pb2")

log = logging.getLogger(__name__)


class OrderQueue:
    """Says to all other ranks what one of them is to do; who asks for it does not wait."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._orders: SimpleQueue[bytes] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, move: wire.Move) -> None:
        self._orders.put(wire.Order(move=move).SerializeToString())
        if self._thread is None:  # nobody waits for its end: a rank that is gone may hold it
            self._thread = threading.Thread(target=self._run, daemon=True, name="orders")
            self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._write(self._orders.get())
        except RankLost as error:  # a step will find out too, and end the worker
            log.info("no more orders to move blocks: %s", error)


class RemoteRankMover:
    """Another rank: `obey` has it told."""

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
        except RankLost as error:  # with it the worker ends
            log.info("rank %d reports no more: %s", self._rank, error)


def make_remote_movers(
    rectangles: Sequence[LayerHeadRange], orders: OrderQueue, communicator: Communicator
) -> list[RemoteRankMover]:
    """All ranks but the leading one; rectangles: of all."""
    return [
        RemoteRankMover(rank, rectangles[rank], orders, RemoteReader(communicator, rank))
        for rank in range(1, len(rectangles))
    ]


class Reporter:
    """Another rank's end: says what came of its orders, from any thread."""

    def __init__(self, communicator: Communicator, seconds: float) -> None:
        self._writer = RemoteWriter(communicator, 0, seconds)
        self._lock = threading.Lock()
        self._lost = False

    def report(self, report: wire.Report) -> None:
        """To the leading rank, if it is still there: each more would wait for it as long."""
        with self._lock:
            if self._lost:
                return
            try:
                self._writer.write(report.SerializeToString())
            except RankLost as error:  # the next step ends this rank
                self._lost = True
                log.warning("the leading rank takes no reports: %s", error)
