"""Source side of the protocol: windows, credits, aborts, deadlines and a broken channel."""

from typing import TypeVar

import numpy as np
import pytest

from penstock.workers.kv_transfer.protocol.messages import (
    Credit,
    End,
    Header,
    Moved,
    Outcome,
    TransferRoutes,
)
from penstock.workers.kv_transfer.protocol.send import (
    WINDOW,
    CloseChannel,
    OutgoingTransfer,
    SendCommand,
    SendPiece,
    SendProtocol,
    Sent,
    Unpin,
    Write,
)
from penstock.workers.kv_transfer.shards import BlockShape, LayerHeadRange, Route

SHAPE, WHOLE, SECONDS = BlockShape(4, 10), LayerHeadRange(0, 1, 0, 1), 5.0
ROUTES = TransferRoutes([Route(0, 0, WHOLE)], SHAPE)

C = TypeVar("C")


def outgoing(epoch: int, num_blocks: int, start: int = 0) -> OutgoingTransfer:
    blocks = np.arange(10, 10 + num_blocks, dtype=np.int32)
    return OutgoingTransfer("r", 3, 1, epoch, start, start + 4 * num_blocks, blocks)


def of(commands: list[SendCommand], kind: type[C]) -> list[C]:
    return [each for each in commands if isinstance(each, kind)]


def written(commands: list[SendCommand]) -> list[Header | End]:
    return [each.message for each in of(commands, Write)]


class Source:
    """A connected channel with one rank pair and messages of one block."""

    def __init__(self) -> None:
        self.protocol = SendProtocol(4, SECONDS, 0.0)
        self.protocol.connected(ROUTES, 0.0)

    def send(self, transfer: OutgoingTransfer, now: float = 0.0) -> OutgoingTransfer:
        self.protocol.send(transfer, 10, now)
        return transfer

    def credit(self, epoch: int, index: int, discard: bool = False) -> None:
        self.protocol.on_message(Credit(epoch, index, discard), 0.0)

    def moved(self, epoch: int, index: int, broken: str = "") -> None:
        self.protocol.on_moved(Moved(epoch, index, 10, broken=broken), 0.0)


def test_nothing_is_announced_before_the_channel_is_connected() -> None:
    protocol = SendProtocol(4, SECONDS, 0.0)
    protocol.send(outgoing(1, 2), 10, 0.0)
    assert protocol.commands() == []
    protocol.connected(ROUTES, 1.0)
    assert [each.index for each in written(protocol.commands()) if isinstance(each, Header)] == [
        0,
        1,
    ]


def test_transfer_is_unpinned_after_the_last_read_and_then_ended() -> None:
    source = Source()
    transfer = source.send(outgoing(1, 2))
    source.protocol.commands()
    source.credit(1, 0)
    source.credit(1, 1)
    pieces = [each.piece for each in of(source.protocol.commands(), SendPiece)]
    assert [each.blocks.tolist() for each in pieces] == [[10], [11]]
    source.moved(1, 0)
    assert source.protocol.commands() == []
    source.moved(1, 1)
    assert source.protocol.commands() == [
        Unpin(transfer),
        Write(End(1, 2, False)),
        Sent(transfer),
    ]
    assert not source.protocol.idle, "the destination may still be receiving"
    source.protocol.on_message(Outcome(1, ""), 0.0)
    assert source.protocol.idle


def test_window_limits_announced_messages() -> None:
    source = Source()
    source.send(outgoing(1, WINDOW + 2))
    assert len(written(source.protocol.commands())) == WINDOW
    source.credit(1, 0)
    assert not written(source.protocol.commands()), "a piece that is being sent uses the window"
    source.moved(1, 0)
    assert len(written(source.protocol.commands())) == 1


def test_transfers_announce_alternately_when_the_window_is_full() -> None:
    source = Source()
    for epoch in (1, 2, 3):
        source.send(outgoing(epoch, WINDOW + 2))
    found = []
    for index in range(WINDOW):
        source.credit(1, index)
        source.moved(1, index)
    for message in written(source.protocol.commands()):
        assert isinstance(message, Header)
        found.append((message.epoch, message.index))
    assert found == [(1, index) for index in range(WINDOW)] + [(1, 4), (2, 0), (3, 0), (1, 5)]


def test_discarded_message_aborts_the_transfer() -> None:
    source = Source()
    transfer = source.send(outgoing(1, WINDOW + 2))
    source.protocol.commands()
    source.credit(1, 0, discard=True)
    for index in range(1, WINDOW):
        assert source.protocol.commands() == []
        source.credit(1, index, discard=True)
    assert source.protocol.commands() == [
        Unpin(transfer),
        Write(End(1, WINDOW, True)),
        Sent(transfer),
    ]
    assert source.protocol.idle


def test_aborted_transfer_still_sends_what_the_destination_awaits() -> None:
    source = Source()
    transfer = source.send(outgoing(1, WINDOW + 2))
    transfer.aborted = True
    source.protocol.commands()
    for index in range(WINDOW):
        source.credit(1, index)
    assert len(of(source.protocol.commands(), SendPiece)) == WINDOW
    for index in range(WINDOW):
        assert source.protocol.commands() == []
        source.moved(1, index)
    assert Write(End(1, WINDOW, True)) in source.protocol.commands()


def test_aborted_transfer_leaves_the_window_to_others() -> None:
    source = Source()
    source.send(outgoing(1, WINDOW))
    aborted, other = source.send(outgoing(2, 1)), source.send(outgoing(3, 1))
    aborted.aborted = True
    source.protocol.commands()
    source.credit(1, 0)
    source.moved(1, 0)
    commands = source.protocol.commands()
    assert Unpin(aborted) in commands
    assert [each.epoch for each in written(commands)] == [2, 3]
    assert Unpin(other) not in commands


@pytest.mark.parametrize("transfer", [outgoing(1, 2, start=2), OutgoingTransfer.aborting(1)])
def test_transfer_without_messages_is_aborted_at_once(transfer: OutgoingTransfer) -> None:
    source = Source()
    source.send(transfer)
    assert source.protocol.commands() == [
        Unpin(transfer),
        Write(End(1, 0, True)),
        Sent(transfer),
    ]


def test_broken_channel_keeps_blocks_pinned_while_a_rank_reads_them() -> None:
    source = Source()
    reading, waiting = source.send(outgoing(1, 2)), source.send(outgoing(2, 1))
    source.credit(1, 0)
    source.protocol.commands()
    source.protocol.close("the test")
    assert source.protocol.commands() == [
        CloseChannel("the test"),
        Unpin(waiting),
        Sent(waiting, "the test"),
    ]
    source.moved(1, 0, broken="the connection of this pair of ranks is closed")
    assert source.protocol.commands() == [Unpin(reading), Sent(reading, "the test")]
    late = source.send(outgoing(3, 1))
    assert source.protocol.commands() == [Unpin(late), Sent(late, "the test")]


def test_rank_that_cannot_send_breaks_the_channel() -> None:
    source = Source()
    transfer = source.send(outgoing(1, 1))
    source.credit(1, 0)
    source.protocol.commands()
    source.moved(1, 0, broken="out of memory")
    assert source.protocol.commands() == [
        CloseChannel("out of memory"),
        Unpin(transfer),
        Sent(transfer, "out of memory"),
    ]


def test_unknown_credit_breaks_the_channel() -> None:
    source = Source()
    source.credit(1, 0)
    assert "not announced" in source.protocol.broken


def test_second_transfer_of_an_epoch_is_refused() -> None:
    source = Source()
    source.send(outgoing(1, 1))
    source.protocol.commands()
    again = source.send(outgoing(1, 1))
    assert source.protocol.commands() == [
        Unpin(again),
        Sent(again, "epoch 1 is being sent already"),
    ]


def test_channel_breaks_when_the_destination_grants_no_credit() -> None:
    protocol = SendProtocol(4, SECONDS, 0.0)
    protocol.connected(ROUTES, 0.0)
    protocol.send(outgoing(1, 1), 10, 2.0)
    assert protocol.check_deadlines(2.0 + SECONDS - 0.1) == 2.0 + SECONDS
    assert protocol.check_deadlines(2.0 + SECONDS) is None
    assert protocol.broken == "no credit from the destination for 5 s"


@pytest.mark.parametrize("waits", [False, True])
def test_channel_that_does_not_connect_in_time_breaks_with_or_without_a_transfer(
    waits: bool,
) -> None:
    protocol = SendProtocol(4, SECONDS, 1.0)
    if waits:
        protocol.send(outgoing(1, 1), 10, 2.0)
    assert not protocol.is_connected
    assert protocol.check_deadlines(1.0) == 1.0 + SECONDS
    assert protocol.check_deadlines(1.0 + SECONDS) is None
    assert protocol.broken == "no connection to the destination for 5 s"


def test_connected_channel_without_transfers_has_no_deadline() -> None:
    protocol = SendProtocol(4, SECONDS, 0.0)
    protocol.connected(ROUTES, 1.0)
    assert protocol.is_connected
    assert protocol.check_deadlines(100.0) is None
    assert not protocol.broken
