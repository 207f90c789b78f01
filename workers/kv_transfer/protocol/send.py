"""Source side of the KV transfer protocol: one channel to one destination worker.

All code is synchronous and without I/O. Inputs are transfers to send, messages of the destination,
reports of the ranks, and the time. Outputs are commands, which `commands` returns.

A header announces each message. The bytes are sent after the destination's credit. A credit is
binding: even if the transfer is aborted, the bytes are sent or the pair breaks. The blocks of a
transfer are unpinned when no rank reads them any more.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeAlias

from penstock.workers.kv_transfer.protocol.messages import (
    Credit,
    End,
    Header,
    Moved,
    Outcome,
    PairKey,
    Piece,
    TransferRoutes,
)
from penstock.workers.kv_transfer.shards import Shard, blocks_of, split
from penstock.workers.scheduling.sequence import NO_TOKENS, Ints

WINDOW = 4  # maximum number of announced, unsent messages of a pair; bounds the memory for staging


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """One transfer: positions [start, stop) of a sequence.

    `blocks` are the pinned blocks that hold these positions; the first block holds `start`.
    """

    router: str
    request: int
    attempt: int  # attempt number at the destination
    epoch: int
    start: int
    stop: int
    blocks: Ints
    aborted: bool = False  # True: announce no further messages. The owner of the lease sets this.

    @classmethod
    def aborting(cls, epoch: int) -> "OutgoingTransfer":
        """Return a transfer without blocks that only sends an abort to the destination."""
        return cls("", 0, 0, epoch, 0, 0, NO_TOKENS, aborted=True)


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Write:
    """Write a message to the control channel of the destination."""

    message: Header | End


@dataclass(frozen=True, slots=True)
class SendPiece:
    """Make the pair's source rank send a piece, after the pair's earlier pieces."""

    pair: PairKey
    piece: Piece


@dataclass(frozen=True, slots=True)
class CloseChannel:
    """Close the control channel and the rank pairs."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unpin:
    """Release a transfer's blocks, after all ranks have stopped reading.

    This command is given once per transfer.
    """

    transfer: OutgoingTransfer


@dataclass(frozen=True, slots=True)
class Sent:
    """Report that a transfer has ended at the source. Emitted once per transfer, after `Unpin`.

    If `broken` is not empty, the channel broke, and the destination may still expect the transfer.
    """

    transfer: OutgoingTransfer
    broken: str = ""


SendCommand: TypeAlias = Write | SendPiece | CloseChannel | Unpin | Sent


# ---------------------------------------------------------------- state


@dataclass(slots=True, eq=False)
class _Sending:
    """A transfer that has not ended, and its progress."""

    outgoing: OutgoingTransfer
    message_bytes: int
    deadline: float  # the next credit must arrive by this time
    # messages that are not announced yet
    messages: deque[tuple[PairKey, Shard]] = field(default_factory=deque)
    num_announced: int = 0
    num_pending: int = 0  # number of messages that are announced, but neither sent nor discarded
    discarded: bool = False  # the destination has discarded a message

    @property
    def stopped(self) -> bool:
        return self.outgoing.aborted or self.discarded or not self.messages


@dataclass(frozen=True, slots=True)
class _Message:
    """An announced message."""

    pair: PairKey
    piece: Piece
    transfer: _Sending


@dataclass(slots=True)
class _Window:
    """Flow control of one rank pair."""

    num_pending: int = 0
    waiting: deque[_Sending] = field(
        default_factory=deque
    )  # transfers whose messages are announced next, in this order

    @property
    def is_full(self) -> bool:
        return self.num_pending >= WINDOW


class SendProtocol:
    """Source side of all KV transfers over one channel. A broken channel cannot be repaired.

    Args:
        block_size: Positions per block at the source.
        seconds: Time limit for the connection, and for an answer of the destination.
        now: Time at which the channel begins to connect.
    """

    def __init__(self, block_size: int, seconds: float, now: float) -> None:
        self.broken = ""  # reason why the channel is broken; empty: it is not broken
        self._block_size = block_size
        self._seconds = seconds
        self._connect_by = now + seconds
        # routes between the ranks; None until the channel is connected
        self._routes: TransferRoutes | None = None
        self._transfers: dict[int, _Sending] = {}  # by epoch
        self._open_epochs: set[int] = set()  # epochs without an Outcome from the destination
        self._windows: dict[PairKey, _Window] = {}
        # announced messages, by epoch and index
        self._announced: dict[tuple[int, int], _Message] = {}
        # messages that a rank must send, but has not yet reported as sent
        self._sending: dict[tuple[int, int], _Message] = {}
        self._commands: list[SendCommand] = []

    def commands(self) -> list[SendCommand]:
        """Return the commands since the last call, to be executed in this order."""
        commands, self._commands = self._commands, []
        return commands

    @property
    def is_connected(self) -> bool:
        """True if the destination has accepted and all rank pairs were connected."""
        return self._routes is not None

    @property
    def idle(self) -> bool:
        """True if the channel can be closed: it has no transfers and no open epochs."""
        return not self._transfers and not self._open_epochs

    # ------------------------------------------------------------ this worker

    def send(self, outgoing: OutgoingTransfer, message_bytes: int, now: float) -> None:
        """Send a transfer as soon as the channel is connected.

        An aborted transfer sends no data; it only announces its end.

        Args:
            message_bytes: Maximum size of a message.
        """
        transfer = _Sending(outgoing, message_bytes, now + self._seconds)
        if outgoing.epoch in self._transfers or self.broken:
            repeated = f"epoch {outgoing.epoch} is being sent already"
            self._commands += Unpin(outgoing), Sent(outgoing, self.broken or repeated)
            return
        self._transfers[outgoing.epoch] = transfer
        self._open_epochs.add(outgoing.epoch)
        if self._routes is not None:
            self._begin(transfer, self._routes, now)

    def close(self, reason: str) -> None:
        """Close the channel, which breaks all its transfers.

        If a rank is sending a message, the transfer ends when the rank reports this message.
        """
        if self.broken:
            return
        self.broken = reason
        self._commands.append(CloseChannel(reason))
        for message in self._announced.values():
            message.transfer.num_pending -= 1
        self._announced.clear()
        self._open_epochs.clear()  # a closed channel gets no more outcomes from the destination
        for transfer in list(self._transfers.values()):
            if not transfer.num_pending:
                self._end(transfer)

    # ------------------------------------------------------------ messages of the destination

    def connected(self, found: TransferRoutes, now: float) -> None:
        """Begin to send: the destination has accepted, and all rank pairs are connected."""
        if self.broken:
            return
        self._routes = found
        self._windows = {(each.source, each.destination): _Window() for each in found.routes}
        for transfer in list(self._transfers.values()):
            self._begin(transfer, found, now)

    def on_message(self, message: Credit | Outcome, now: float) -> None:
        """Handle a message of the destination; ignore it if the channel is broken."""
        if self.broken:
            return
        match message:
            case Credit():
                self._on_credit(message, now)
            case Outcome():
                self._open_epochs.discard(message.epoch)

    def _on_credit(self, credit: Credit, now: float) -> None:
        name = (credit.epoch, credit.index)
        message = self._announced.pop(name, None)
        if message is None:
            self.close("the destination sent a credit for a message that was not announced")
        elif credit.discard:
            message.transfer.discarded = True
            self._settle(message, now)
        else:
            # Send in the order of the credits, because the destination receives in that order.
            self._sending[name] = message
            self._commands.append(SendPiece(message.pair, message.piece))

    # ------------------------------------------------------------ reports of the ranks

    def on_moved(self, moved: Moved, now: float) -> None:
        """Handle a rank's report: a piece was sent or failed, so its blocks are no longer read."""
        message = self._sending.pop((moved.epoch, moved.index), None)
        if moved.broken:
            self.close(moved.broken)
        if message is not None:
            self._settle(message, now)

    # ------------------------------------------------------------ progress of the transfers

    def check_deadlines(self, now: float) -> float | None:
        """Close the channel if the connection or an answer of the destination takes too long.

        Returns:
            Time of the next check, or None if nothing is awaited.
        """
        if self._routes is None:
            deadlines, awaited = [self._connect_by], "connection to"
        else:
            deadlines = [each.deadline for each in self._transfers.values()]
            awaited = "credit from"
        if self.broken or not deadlines:
            return None
        if min(deadlines) <= now:
            self.close(f"no {awaited} the destination for {self._seconds:g} s")
            return None
        return min(deadlines)

    def _begin(self, transfer: _Sending, found: TransferRoutes, now: float) -> None:
        # A transfer that starts inside a unit cannot be sent, so it gets no messages.
        # `_end` then reports it as aborted.
        outgoing = transfer.outgoing
        if not outgoing.aborted and outgoing.start % found.unit.block_size == 0:
            messages = _messages(found, outgoing, transfer.message_bytes)
            transfer.messages = deque(messages)
        transfer.deadline = now + self._seconds
        self._advance(transfer, now)

    def _advance(self, transfer: _Sending, now: float, is_first: bool = False) -> None:
        """Announce messages until a window is full; end the transfer if nothing is left.

        Args:
            is_first: True: this transfer announces before the transfers that wait for the window.
        """
        while not transfer.stopped:
            window = self._windows[transfer.messages[0][0]]
            if window.is_full or (window.waiting and not is_first):
                window.waiting.append(transfer)
                return
            is_first = False
            window.num_pending += 1
            self._announce(transfer)
            transfer.deadline = now + self._seconds
        if not transfer.num_pending:
            self._end(transfer)

    def _announce(self, transfer: _Sending) -> None:
        assert self._routes is not None
        unit, outgoing = self._routes.unit, transfer.outgoing
        pair, shard = transfer.messages.popleft()
        epoch, index = outgoing.epoch, transfer.num_announced
        blocks = blocks_of(shard, outgoing.blocks, outgoing.start, self._block_size)
        piece = Piece(epoch, index, shard, blocks, unit.block_size)
        self._announced[epoch, index] = _Message(pair, piece, transfer)
        transfer.num_announced += 1
        transfer.num_pending += 1
        request = (outgoing.router, outgoing.request, outgoing.attempt)
        header = Header(*request, epoch, index, pair, shard, unit.num_bytes(shard))
        self._commands.append(Write(header))

    def _settle(self, message: _Message, now: float) -> None:
        """Record that a message's blocks are no longer read; resume waiting transfers."""
        transfer, window = message.transfer, self._windows[message.pair]
        transfer.num_pending -= 1
        window.num_pending -= 1
        if self.broken:
            if not transfer.num_pending:
                self._end(transfer)
            return
        if transfer.stopped:
            self._leave_queue(transfer)
            if not transfer.num_pending:
                self._end(transfer)
        while window.waiting and not window.is_full:
            self._advance(window.waiting.popleft(), now, is_first=True)

    def _leave_queue(self, transfer: _Sending) -> None:
        if transfer.messages:
            waiting = self._windows[transfer.messages[0][0]].waiting
            if transfer in waiting:
                waiting.remove(transfer)

    def _end(self, transfer: _Sending) -> None:
        """End a transfer that has no pending message."""
        outgoing = transfer.outgoing
        del self._transfers[outgoing.epoch]
        self._commands.append(Unpin(outgoing))
        if not self.broken:
            num = transfer.num_announced
            aborted = outgoing.aborted or transfer.discarded or not num
            if aborted:
                self._open_epochs.discard(outgoing.epoch)
            self._commands.append(Write(End(outgoing.epoch, num, aborted)))
        self._commands.append(Sent(outgoing, self.broken))


def _messages(
    found: TransferRoutes, outgoing: OutgoingTransfer, message_bytes: int
) -> Iterator[tuple[PairKey, Shard]]:
    """Yield all messages of a transfer, alternating between the pairs."""
    positions = (outgoing.start, outgoing.stop)
    by_route = [
        [
            ((route.source, route.destination), shard)
            for shard in split(route.overlap, *positions, found.unit, message_bytes)
        ]
        for route in found.routes
    ]
    for messages in zip_longest(*by_route):
        yield from (each for each in messages if each is not None)
