"""Destination side of the protocol: headers, results, deadlines and replaced sources."""

from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from penstock.workers.kv_transfer.protocol import receive
from penstock.workers.kv_transfer.protocol.messages import Credit, End, Header, Moved, Outcome
from penstock.workers.kv_transfer.protocol.receive import (
    CloseSource,
    DrainRank,
    ExpectedTransfer,
    Finished,
    ReceiveCommand,
    ReceivePiece,
    ReceiveProtocol,
    Reply,
)
from penstock.workers.kv_transfer.shards import BlockShape, LayerHeadRange, Shard

SHAPE, WHOLE, SECONDS = BlockShape(4, 12), LayerHeadRange(0, 1, 0, 1), 5.0
PAIR = (0, 0)
SOURCE = ("s", "1")

C = TypeVar("C")


class Target:
    """A destination with one rank."""

    def __init__(self) -> None:
        self.protocol = ReceiveProtocol(SHAPE, [WHOLE], SECONDS)

    def connect(self, source: tuple[str, str] = SOURCE) -> int:
        peer = self.protocol.connect(source, 4, [WHOLE])
        assert peer is not None
        return peer.generation

    def expect(self, source: tuple[str, str] = SOURCE, now: float = 0.0) -> int:
        blocks = np.array([7, 8], np.int32)
        return self.protocol.open(ExpectedTransfer("r", 3, 1, source, 4, 12, blocks), now)

    def announce(self, generation: int, epoch: int, now: float = 0.0) -> None:
        for header in headers(epoch):
            self.protocol.on_message(generation, header, now)

    def moved(self, generation: int, epoch: int, index: int, **problem: str) -> None:
        self.protocol.on_moved(generation, PAIR, Moved(epoch, index, 12, **problem), 0.0)

    def reasons(self) -> dict[int, str]:
        """Return the reason of each new result, by epoch."""
        finished = of(self.protocol.commands(), Finished)
        return {each.result.epoch: each.result.reason for each in finished}


def headers(epoch: int) -> list[Header]:
    first = Header("r", 3, 1, epoch, 0, PAIR, Shard(WHOLE, 4, 8), 12)
    return [first, replace(first, index=1, shard=Shard(WHOLE, 8, 12))]


def of(commands: list[ReceiveCommand], kind: type[C]) -> list[C]:
    return [each for each in commands if isinstance(each, kind)]


def test_transfer_succeeds_when_all_pieces_are_received() -> None:
    target = Target()
    generation, epoch = target.connect(), target.expect()
    target.announce(generation, epoch)
    commands = target.protocol.commands()
    pieces = [each.piece for each in of(commands, ReceivePiece)]
    assert [each.blocks.tolist() for each in pieces] == [[7], [8]]
    credits = [Reply(generation, Credit(epoch, index, False)) for index in (0, 1)]
    assert of(commands, Reply) == credits
    target.moved(generation, epoch, 1)
    assert target.protocol.commands() == []
    target.moved(generation, epoch, 0)
    outcome, finished, drain = target.protocol.commands()
    assert outcome == Reply(generation, Outcome(epoch, ""))
    assert isinstance(finished, Finished)
    assert (finished.result.reason, finished.result.num_bytes) == ("", 24)
    assert drain == DrainRank(0, epoch)
    assert target.protocol.num_unfinished == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"router": "x"}, "another request"),
        ({"attempt": 2}, "another request"),
        ({"shard": Shard(WHOLE, 0, 4)}, "this rank receives only"),
        ({"num_bytes": 11}, "11 bytes, but its positions, layers and heads need 12"),
        ({"pair": (0, 1)}, "unknown rank pair"),
    ],
)
def test_invalid_header_is_discarded_and_received_nowhere(
    changes: dict[str, object], reason: str
) -> None:
    target = Target()
    generation, epoch = target.connect(), target.expect()
    header = replace(headers(epoch)[0], **changes)  # type: ignore[arg-type]
    target.protocol.on_message(generation, header, 0.0)
    commands = target.protocol.commands()
    assert not of(commands, ReceivePiece)
    assert of(commands, Reply)[-1] == Reply(generation, Credit(epoch, 0, True))
    (finished,) = of(commands, Finished)
    assert reason in finished.result.reason


def test_result_waits_until_the_rank_has_drained() -> None:
    target = Target()
    generation, epoch = target.connect(), target.expect()
    target.announce(generation, epoch)
    target.protocol.close(epoch)
    commands = target.protocol.commands()
    assert DrainRank(0, epoch) in commands
    assert not of(commands, Finished)
    assert target.protocol.num_unfinished == 1
    target.protocol.on_drained(0, epoch)
    assert target.reasons() == {epoch: "dropped"}
    target.protocol.on_drained(0, epoch)
    target.protocol.close(epoch)
    assert target.reasons() == {}


@pytest.mark.parametrize(
    ("end", "reason"),
    [(End(1, 0, True), "the source gave up"), (End(1, 0, False), "ended before everything")],
)
def test_end_fails_an_incomplete_transfer(end: End, reason: str) -> None:
    target = Target()
    generation, epoch = target.connect(), target.expect()
    target.protocol.on_message(generation, end, 0.0)
    assert reason in target.reasons()[epoch]


def test_end_after_all_headers_waits_for_the_bytes() -> None:
    target = Target()
    generation, epoch = target.connect(), target.expect()
    target.announce(generation, epoch)
    target.protocol.on_message(generation, End(epoch, 2, False), 0.0)
    assert target.reasons() == {}


def test_messages_of_another_source_change_nothing() -> None:
    target = Target()
    epoch, other = target.expect(), target.connect(("t", "1"))
    target.announce(other, epoch)
    target.protocol.on_message(other, End(epoch, 0, True), 0.0)
    commands = target.protocol.commands()
    assert [each.message for each in of(commands, Reply)] == [
        Credit(epoch, 0, True),
        Credit(epoch, 1, True),
    ]
    assert len(commands) == 2


def test_wrong_checksum_fails_the_transfer_and_keeps_the_pair() -> None:
    target = Target()
    generation, epoch = target.connect(), target.expect()
    target.announce(generation, epoch)
    target.moved(generation, epoch, 0, problem="checksum mismatch")
    target.protocol.on_drained(0, epoch)
    commands = target.protocol.commands()
    assert Reply(generation, Outcome(epoch, "checksum mismatch")) in commands
    assert not of(commands, CloseSource)


def test_broken_pair_fails_the_transfers_of_its_source_only() -> None:
    target = Target()
    generation, epoch = target.connect(), target.expect()
    target.connect(("t", "1"))
    other = target.expect(("t", "1"))
    target.announce(generation, epoch)
    target.moved(generation, epoch, 0, broken="timed out")
    target.protocol.on_drained(0, epoch)
    commands = target.protocol.commands()
    assert of(commands, CloseSource) == [CloseSource(generation)]
    assert [each.result.epoch for each in of(commands, Finished)] == [epoch]
    target.protocol.close(other)


def test_reconnected_source_fails_only_the_transfers_that_it_has_begun() -> None:
    target = Target()
    generation, begun, later = target.connect(), target.expect(), target.expect()
    target.announce(generation, begun)
    again = target.connect()
    assert CloseSource(generation) in target.protocol.commands()
    target.protocol.on_drained(0, begun)
    assert "opened another channel" in target.reasons()[begun]
    target.announce(generation, later)  # ignored, because the source's first channel is closed
    assert target.protocol.commands() == []
    target.announce(again, later)
    assert len(of(target.protocol.commands(), ReceivePiece)) == 2


def test_message_larger_than_a_buffer_fails_its_transfer_and_is_not_received() -> None:
    target = Target()
    target.protocol = ReceiveProtocol(SHAPE, [WHOLE], SECONDS, [12.0])
    generation, fits, large = target.connect(), target.expect(), target.expect()
    target.announce(generation, fits)
    whole = Header("r", 3, 1, large, 0, PAIR, Shard(WHOLE, 4, 12), 24)
    target.protocol.on_message(generation, whole, 0.0)
    commands = target.protocol.commands()
    assert {each.piece.epoch for each in of(commands, ReceivePiece)} == {fits}
    assert Reply(generation, Credit(large, 0, True)) in commands
    (failed,) = of(commands, Finished)
    assert failed.result.reason == (
        "a message has 24 bytes, expected at most 12, the size of a message buffer"
    )


def test_restarted_source_fails_all_transfers_of_its_earlier_incarnation() -> None:
    target = Target()
    target.connect()
    epoch, other = target.expect(), target.expect(("s", "2"))
    target.connect(("s", "2"))
    assert list(target.reasons()) == [epoch]
    target.protocol.close(other)


def test_transfer_without_progress_fails_at_its_deadline() -> None:
    target = Target()
    generation, first, second = target.connect(), target.expect(), target.expect()
    target.announce(generation, first, now=3.0)
    assert target.protocol.check_deadlines(4.9) == SECONDS
    assert target.protocol.check_deadlines(SECONDS) == 3.0 + SECONDS
    assert target.reasons() == {second: "nothing came for 5 s"}
    assert target.protocol.check_deadlines(3.0 + SECONDS) is None
    target.protocol.on_drained(0, first)
    assert target.reasons() == {first: "nothing came for 5 s"}


def test_idle_source_makes_room_for_another_and_busy_sources_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receive, "MAX_PEERS", 2)
    target = Target()
    idle, _ = target.connect(("a", "1")), target.connect(("b", "1"))
    target.expect(("b", "1"))
    target.connect(("c", "1"))
    assert of(target.protocol.commands(), CloseSource) == [CloseSource(idle)]
    target.expect(("c", "1"))
    assert target.protocol.connect(("d", "1"), 4, [WHOLE]) is None
    assert target.protocol.commands() == []


def test_early_connection_takes_no_slot_of_another_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "MAX_PEERS", 1)
    target = Target()
    target.connect(("a", "1"))
    assert target.protocol.connect(("b", "1"), 4, [WHOLE], early=True) is None
    assert target.protocol.commands() == []
    assert target.protocol.connect(("a", "2"), 4, [WHOLE], early=True) is not None, "its own slot"
