"""KV transfers on a device that completes work late, as a GPU does.

The tests check that reports are sent, and buffers reused, only after the work has completed. The
lane (CUDA stream) of these tests runs work immediately, but reaches a mark (CUDA event) only when
the test lets it.
"""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from penstock.protos import ranks_pb2 as wire
from penstock.workers.kv_transfer import rank_mover
from penstock.workers.kv_transfer.codec import encode_piece
from penstock.workers.kv_transfer.lanes import Lane, Waitable
from penstock.workers.kv_transfer.protocol.messages import Piece
from penstock.workers.kv_transfer.rank_mover import RankMover
from penstock.workers.kv_transfer.shards import LayerHeadRange, Shard
from penstock.workers.kv_transfer.staging import KvStaging

WHOLE = LayerHeadRange(0, 2, 0, 1)


class SlowLane(Lane):
    """A lane that reaches mark number n once `num_reached` is at least n."""

    def __init__(self) -> None:
        self.num_reached = 0
        self.num_marks = 0
        self.marked = threading.Semaphore(0)

    def mark(self) -> Waitable:
        self.num_marks += 1
        self.marked.release()
        return _Mark(self, self.num_marks)


class _Mark:
    def __init__(self, lane: SlowLane, number: int) -> None:
        self._lane, self._number = lane, number

    def ready(self) -> bool:
        return self._lane.num_reached >= self._number


class Destination:
    """A mover with slow lanes as the destination, and one fast mover for each source."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_sources: int) -> None:
        lanes: list[SlowLane] = []

        def make_lane(device: torch.device) -> Lane:
            lanes.append(SlowLane())
            return lanes[-1]

        monkeypatch.setattr(rank_mover, "make_lane", make_lane)
        self.cache = torch.randn(2, 2, 8, 1, 4, 3)
        self.mover = RankMover(KvStaging(self.cache, WHOLE), "127.0.0.1", 20.0)
        self.lane = lanes[1]  # the lane for received messages
        monkeypatch.undo()
        self.sent = [torch.randn(2, 2, 8, 1, 4, 3) for _ in range(num_sources)]
        self.sources = [RankMover(KvStaging(each, WHOLE), "127.0.0.1", 20.0) for each in self.sent]
        self.reports: list[wire.Report] = []
        self._changed = threading.Condition()
        self._open = threading.Event()
        self.mover.listen(self._on_report)
        for number, source in enumerate(self.sources):
            source.listen(lambda report, number=number: self._pass_on(number, report))  # type: ignore[misc]
            self.mover.execute(wire.Move(end=number, open=wire.Open(receives=True)))
            source.execute(wire.Move(end=number, open=wire.Open(receives=False)))
        self._open.set()
        assert not any(each.met.broken for each in self.wait_for("met", num_sources))

    def transfer(self, number: int, epoch: int, block: int, index: int = 0) -> None:
        """Send block 1 of source `number` to `block` of the destination."""
        self.receive(number, epoch, block, index)
        self.sources[number].execute(wire.Move(end=number, send=piece(epoch, 1, index)))

    def receive(self, number: int, epoch: int, block: int, index: int = 0) -> None:
        self.mover.execute(wire.Move(end=number, receive=piece(epoch, block, index)))

    def reach(self, num_marks: int) -> None:
        """Let the lane reach its first `num_marks` marks."""
        self.lane.num_reached = num_marks
        self.mover._thread.wake()

    def wait_for_mark(self) -> None:
        assert self.lane.marked.acquire(timeout=60)

    def kinds(self, kind: str) -> list[wire.Report]:
        return [each for each in self.reports if each.WhichOneof("body") == kind]

    def wait_for(self, kind: str, num: int = 1) -> list[wire.Report]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.kinds(kind)) >= num, 60)
        return self.kinds(kind)

    def stop(self) -> None:
        for mover in (self.mover, *self.sources):
            mover.stop()

    def _on_report(self, report: wire.Report) -> None:
        with self._changed:
            self.reports.append(report)
            self._changed.notify_all()
        if report.HasField("value"):
            assert self._open.wait(60)
            move = wire.Move(end=report.end, value=report.value)
            self.sources[report.end].execute(move)

    def _pass_on(self, number: int, report: wire.Report) -> None:
        if report.HasField("value"):
            assert self._open.wait(60)
            self.mover.execute(wire.Move(end=number, value=report.value))


def piece(epoch: int, block: int, index: int) -> wire.Piece:
    return encode_piece(Piece(epoch, index, Shard(WHOLE, 0, 4), np.array([block], np.int32), 4))


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Destination]:
    destination = Destination(monkeypatch, 1)
    yield destination
    destination.stop()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Destination]:
    destination = Destination(monkeypatch, 2)
    yield destination
    destination.stop()


def test_piece_is_written_after_its_checksum_and_reported_after_its_write(
    one: Destination,
) -> None:
    before = one.cache.clone()
    one.transfer(0, epoch=1, block=5)
    one.wait_for_mark()  # this mark follows the computation of the checksum
    assert torch.equal(one.cache, before)
    one.reach(1)
    one.wait_for_mark()  # this mark follows the write
    assert not one.kinds("moved")
    one.reach(2)
    (report,) = one.wait_for("moved")
    assert (report.moved.problem, report.moved.broken) == ("", "")
    before[:, :, 5] = one.sent[0][:, :, 1]
    assert torch.equal(one.cache, before)


def test_epoch_is_not_settled_while_the_device_writes_its_blocks(one: Destination) -> None:
    one.transfer(0, epoch=1, block=5)
    one.wait_for_mark()
    one.reach(1)
    one.wait_for_mark()
    one.mover.execute(wire.Move(settle=1))
    assert not one.kinds("settled")
    one.reach(2)
    one.wait_for("settled")
    one.wait_for("moved")
    assert [each.WhichOneof("body") for each in one.reports[-2:]] == ["settled", "moved"]


def test_epoch_that_is_settled_before_the_write_is_not_written(one: Destination) -> None:
    before = one.cache.clone()
    one.transfer(0, epoch=1, block=5)
    one.wait_for_mark()
    one.mover.execute(wire.Move(settle=1))
    one.wait_for("settled")
    one.reach(9)
    (report,) = one.wait_for("moved")
    assert report.moved.broken == ""
    assert torch.equal(one.cache, before)


def test_closed_pair_is_reported_last_and_after_the_device_has_written(one: Destination) -> None:
    one.transfer(0, epoch=1, block=5)
    one.wait_for_mark()
    one.reach(1)
    one.wait_for_mark()
    one.mover.execute(wire.Move(end=0, close=wire.Close()))
    assert not one.kinds("closed")
    one.reach(2)
    one.wait_for("closed")
    assert [each.WhichOneof("body") for each in one.reports[-2:]] == ["moved", "closed"]


def test_source_that_stalls_does_not_delay_another(two: Destination) -> None:
    for index in range(4):  # more messages than a pair may have buffers
        two.receive(0, epoch=1, block=5, index=index)
    two.reach(99)
    for index in range(4):
        two.transfer(1, epoch=2, block=6, index=index)
    assert {each.moved.epoch for each in two.wait_for("moved", 4)} == {2}
    assert torch.equal(two.cache[:, :, 6], two.sent[1][:, :, 1])
