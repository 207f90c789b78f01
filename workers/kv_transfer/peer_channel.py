"""Sender side of the connection to one peer worker: the gRPC control channel and its rank pairs.

`SendProtocol` makes all decisions. This module passes messages of the destination and reports of
the ranks to the protocol, and executes the protocol's commands.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from math import gcd

import grpc

from penstock.protos import ranks_pb2, transfer_pb2_grpc
from penstock.protos import transfer_pb2 as wire
from penstock.workers.kv_transfer.codec import (
    decode_credit,
    decode_moved,
    decode_outcome,
    encode_from_source,
    holdings,
    rectangle_of,
    store_value,
)
from penstock.workers.kv_transfer.protocol.messages import (
    Credit,
    Outcome,
    PairKey,
    Peer,
    TransferRoutes,
)
from penstock.workers.kv_transfer.protocol.send import (
    CloseChannel,
    OutgoingTransfer,
    SendCommand,
    SendPiece,
    SendProtocol,
    Sent,
    Unpin,
    Write,
)
from penstock.workers.kv_transfer.rank_endpoints import (
    MAX_VALUE_BYTES,
    RankEndpoint,
    RankEndpoints,
    check_peer,
)
from penstock.workers.kv_transfer.shards import routes
from penstock.workers.kv_transfer.staging import PROTOCOL, WorkerIdentity
from penstock.workers.kv_transfer.transport import PairBroken

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Callbacks:
    """Callbacks of a transfer.

    `on_read` is called when the blocks may change again. `ended` is set when the transfer has
    ended.
    """

    on_read: Callable[[], None]
    ended: asyncio.Future[None]


class PeerChannel:
    """Control channel and rank pairs from this worker to one destination.

    All methods run on the event loop. A broken channel cannot be repaired; create a new channel.

    Args:
        bytes_by_pair: Counts the bytes that the ranks have sent.
        on_idle: Called when the channel may have become idle.
        early: The channel is opened before any transfer needs it. A destination without a free slot
            then refuses the channel, instead of closing another one.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        peer: Peer,
        endpoints: RankEndpoints,
        seconds: float,
        bytes_by_pair: Counter[PairKey],
        on_idle: Callable[[], None],
        early: bool = False,
    ) -> None:
        self.peer = peer
        self._early = early
        self._identity = identity
        self._rank_endpoints = endpoints
        self._seconds = seconds
        self._bytes_by_pair = bytes_by_pair
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._protocol = SendProtocol(endpoints.shape.block_size, seconds, self._loop.time())
        self._callbacks: dict[OutgoingTransfer, _Callbacks] = {}
        self._outbox: asyncio.Queue[wire.FromSource] = asyncio.Queue()
        self._endpoints: dict[PairKey, RankEndpoint] = {}
        self._connecting: set[PairKey] = set()
        self._routes: TransferRoutes | None = None
        self._deadline_timer: asyncio.TimerHandle | None = self._loop.call_later(
            seconds, self._check_deadlines
        )
        self._task = asyncio.create_task(self._run())

    @property
    def broken(self) -> str:
        """Reason why the channel is broken; empty if it is not broken."""
        return self._protocol.broken

    @property
    def connected(self) -> bool:
        """True if the destination has accepted and all rank pairs were connected."""
        return self._protocol.is_connected

    @property
    def idle(self) -> bool:
        """True if the channel can be closed: it has no transfers and no open epochs."""
        return self._protocol.idle

    async def send(
        self, outgoing: OutgoingTransfer, message_bytes: int, on_read: Callable[[], None]
    ) -> None:
        """Send a transfer; call `on_read`, also on failure, when no rank reads the blocks any more.

        Raises:
            PairBroken: The connection failed; the destination may still expect the transfer.
        """
        ended: asyncio.Future[None] = self._loop.create_future()
        self._callbacks[outgoing] = _Callbacks(on_read, ended)
        self._protocol.send(outgoing, message_bytes, self._loop.time())
        self._execute()
        if self._deadline_timer is None:
            self._deadline_timer = self._loop.call_later(self._seconds, self._check_deadlines)
        await ended

    def close(self, reason: str) -> None:
        """Close the channel; calls of `send` that are still waiting raise `PairBroken(reason)`.

        If a rank is sending a message, the transfer ends when the rank reports this message.
        """
        self._protocol.close(reason)
        self._execute()

    # ------------------------------------------------------------ control channel

    async def _run(self) -> None:
        reason = "the destination closed the channel"
        try:
            async with grpc.aio.insecure_channel(self.peer.address) as channel:
                metadata = (("authorization", f"Bearer {self.peer.secret}"),)
                stub = transfer_pb2_grpc.TransferStub(channel)  # type: ignore[no-untyped-call]
                async for message in stub.Pair(self._requests(), metadata=metadata):
                    self._on_message(message)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        finally:
            self.close(reason)

    async def _requests(self) -> AsyncIterator[wire.FromSource]:
        introduction = wire.Introduction(
            protocol=PROTOCOL,
            worker=self._identity.worker,
            incarnation=self._identity.incarnation,
            layout=self._identity.layout,
            block_size=self._rank_endpoints.shape.block_size,
            ranks=holdings(self._rank_endpoints.rectangles),
            early=self._early,
        )
        yield wire.FromSource(introduction=introduction)
        while True:
            yield await self._outbox.get()

    def _on_message(self, message: wire.FromDestination) -> None:
        match message.WhichOneof("body"):
            case "accepted":
                self._on_accepted(message.accepted)
            case "value":
                self._on_value(message.value)
            case "credit":
                self._pass_on(decode_credit(message.credit))
            case "outcome":
                outcome = decode_outcome(message.outcome)
                if outcome.reason:
                    text = "KV transfer %d failed at its destination: %s"
                    log.info(text, outcome.epoch, outcome.reason)
                self._pass_on(outcome)

    def _pass_on(self, message: Credit | Outcome) -> None:
        self._protocol.on_message(message, self._loop.time())
        self._execute()

    def _on_accepted(self, accepted: wire.Accepted) -> None:
        """Check that the destination is compatible; open the source endpoint of each rank pair."""
        ranks = self._rank_endpoints
        problem = check_peer(ranks, accepted)
        if accepted.backend != ranks.backend:
            problem = (
                f"it communicates through {accepted.backend}, and this worker through "
                f"{ranks.backend}"
            )
        if problem or self._routes is not None or self.broken:
            self.close(f"incompatible destination: {problem or 'it sent Accepted twice'}")
            return
        theirs = [rectangle_of(each) for each in accepted.ranks]
        unit = ranks.shape.cut(gcd(ranks.shape.block_size, accepted.block_size))
        self._routes = TransferRoutes(routes(ranks.rectangles, theirs), unit)
        for route in self._routes.routes:
            pair = (route.source, route.destination)
            self._connecting.add(pair)
            self._endpoints[pair] = ranks.open(route.source, False, partial(self._on_report, pair))

    def _on_value(self, value: wire.StoreValue) -> None:
        end = self._endpoints.get((value.source_rank, value.destination_rank))
        if end is None or len(value.key) + len(value.value) > MAX_VALUE_BYTES:
            self.close("the destination sent a store value of an unknown pair or that is too large")
        else:
            end.value(value.key, value.value)

    # ------------------------------------------------------------ reports of the ranks

    def _on_report(self, pair: PairKey, report: ranks_pb2.Report) -> None:
        match report.WhichOneof("body"):
            case "value":
                value = store_value(pair, report.value)
                self._outbox.put_nowait(wire.FromSource(value=value))
            case "met":
                self._on_connected(pair, report.met.broken)
            case "moved":
                if not report.moved.broken:
                    self._bytes_by_pair[pair] += report.moved.bytes
                self._protocol.on_moved(decode_moved(report.moved), self._loop.time())
                self._execute()

    def _on_connected(self, pair: PairKey, broken: str) -> None:
        self._connecting.discard(pair)
        if broken:
            self.close(broken)
        elif not self._connecting and self._routes is not None:
            self._protocol.connected(self._routes, self._loop.time())
            self._execute()

    # ------------------------------------------------------------ commands of the protocol

    def _check_deadlines(self) -> None:
        then = self._protocol.check_deadlines(self._loop.time())
        self._deadline_timer = (
            None if then is None else self._loop.call_at(then, self._check_deadlines)
        )
        self._execute()

    def _execute(self) -> None:
        for command in self._protocol.commands():
            self._execute_one(command)
        if self.idle:
            self._on_idle()

    def _execute_one(self, command: SendCommand) -> None:
        match command:
            case Write(message):
                self._outbox.put_nowait(encode_from_source(message))
            case SendPiece(pair, piece):
                self._endpoints[pair].send(piece)
            case CloseChannel():
                self._task.cancel()
                for end in self._endpoints.values():
                    end.close()
            case Unpin(outgoing):
                self._callbacks[outgoing].on_read()
            case Sent(outgoing, broken):
                ended = self._callbacks.pop(outgoing).ended
                if ended.done():
                    return  # the task that waited for the transfer was cancelled
                if broken:
                    ended.set_exception(PairBroken(broken))
                else:
                    ended.set_result(None)
