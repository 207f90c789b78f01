"""Sender side of the connection to one peer worker: the gRPC control channel and its rank pairs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import TypeVar

import grpc

from penstock.protos import ranks_pb2, transfer_pb2_grpc
from penstock.protos import transfer_pb2 as wire
from penstock.workers.kv_transfer.rank_endpoints import (
    MAX_VALUE_BYTES,
    PairKey,
    RankEndpoint,
    RankEndpoints,
    check_peer,
    store_value,
)
from penstock.workers.kv_transfer.rank_mover import rectangle_of
from penstock.workers.kv_transfer.shards import BlockShape, Route, routes
from penstock.workers.kv_transfer.staging import PROTOCOL, WorkerIdentity
from penstock.workers.kv_transfer.transport import PairBroken

log = logging.getLogger(__name__)

T = TypeVar("T")

WINDOW = 4  # maximum announced, unsent messages per pair; bounds staging memory


@dataclass(frozen=True, slots=True)
class Peer:
    """Address and credentials of a destination worker."""

    worker: str
    incarnation: str
    address: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Message:
    pair: PairKey
    piece: ranks_pb2.Piece
    sent: asyncio.Future[int]  # number of bytes sent; 0: the destination discarded the message


@dataclass(frozen=True, slots=True)
class TransferRoutes:
    """Routes of blocks from this worker's ranks to the peer's ranks, and the unit of transfer."""

    routes: Sequence[Route]
    unit: BlockShape  # smallest part of a block that is sent; divides the block sizes of both sides


class PeerChannel:
    """Control channel and rank pairs from this worker to one destination.

    All methods run on the event loop. A broken channel cannot be repaired; create a new channel.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        peer: Peer,
        endpoints: RankEndpoints,
        seconds: float,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.peer = peer
        self.broken = ""  # reason why the channel is broken; empty: it is not broken
        self.num_users = 0  # transfers that use this channel
        self._on_idle = on_idle  # called when the channel may have become idle
        self._open_epochs: set[int] = set()  # epochs without an Outcome from the destination
        self._identity = identity
        self._rank_endpoints = endpoints
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[wire.FromSource] = asyncio.Queue()
        self._announced: dict[tuple[int, int], _Message] = {}
        self._sending: dict[tuple[int, int], _Message] = {}
        self._endpoints: dict[PairKey, RankEndpoint] = {}
        self._windows: dict[PairKey, asyncio.Semaphore] = {}
        self._connecting: set[PairKey] = set()
        self._routes: TransferRoutes | None = None
        self._ready: asyncio.Future[TransferRoutes] = self._loop.create_future()
        self._task = asyncio.create_task(self._run())

    @property
    def idle(self) -> bool:
        """True if the channel can be closed: it has no users and no open epochs."""
        return not self.num_users and not self._open_epochs

    def begin(self, epoch: int) -> None:
        """Record `epoch` as open until its Outcome arrives or `end` aborts the transfer."""
        self._open_epochs.add(epoch)

    async def wait_connected(self) -> TransferRoutes:
        """Wait until all rank pairs are connected and return the routes."""
        return await self._bounded(asyncio.shield(self._ready), "no answer from the destination")

    async def announce(
        self, pair: PairKey, header: wire.Header, piece: ranks_pb2.Piece
    ) -> asyncio.Future[int]:
        """Announce a message, after waiting while `WINDOW` messages of the pair are pending.

        Returns:
            A future of the number of bytes sent, done when the blocks are no longer read.
        """
        window = self._windows[pair]
        await self._bounded(window.acquire(), "no credit from the destination")
        if self.broken:
            window.release()  # so that the next waiter wakes up and raises as well
            raise PairBroken(self.broken)
        sent: asyncio.Future[int] = self._loop.create_future()
        sent.add_done_callback(lambda _: window.release())
        self._announced[header.epoch, header.index] = _Message(pair, piece, sent)
        self._outbox.put_nowait(wire.FromSource(header=header))
        return sent

    async def drain(self, sent: list[asyncio.Future[int]]) -> None:
        """Wait until no rank reads the blocks of these messages, even if the channel breaks."""
        if not sent:
            return
        _, late = await asyncio.wait(sent, timeout=self._seconds)
        if late:
            self.close(f"no credit from the destination for {self._seconds:g} s")
            await asyncio.wait(sent)

    async def end(self, epoch: int, num_messages: int, aborted: bool) -> None:
        if aborted:
            self._open_epochs.discard(epoch)
            self._on_idle()
        await self.wait_connected()
        end = wire.End(epoch=epoch, aborted=aborted, messages=num_messages)
        self._outbox.put_nowait(wire.FromSource(end=end))

    def close(self, reason: str) -> None:
        """Close the channel; calls that wait for it raise `PairBroken(reason)`.

        A message that a rank is already sending is completed when this rank reports it.
        """
        if self.broken:
            return
        self.broken = reason
        self._task.cancel()
        for end in self._endpoints.values():
            end.close()
        _fail(self._ready, reason)
        for message in self._announced.values():
            _fail(message.sent, reason)

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
            ranks=self._rank_endpoints.holdings(),
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
                self._on_credit(message.credit)
            case "outcome":
                self._on_outcome(message.outcome)

    def _on_outcome(self, outcome: wire.Outcome) -> None:
        if not outcome.received:
            log.info("KV transfer %d failed at its destination: %s", outcome.epoch, outcome.reason)
        self._open_epochs.discard(outcome.epoch)
        self._on_idle()

    def _on_accepted(self, accepted: wire.Accepted) -> None:
        """Check that the destination is compatible and open this side of each rank pair."""
        ranks = self._rank_endpoints
        problem = check_peer(ranks, accepted)
        if accepted.backend != ranks.backend:
            problem = f"it communicates through {accepted.backend}, this worker {ranks.backend}"
        if problem or self._routes is not None or self.broken:
            self.close(f"incompatible destination: {problem or 'it sent Accepted twice'}")
            return
        theirs = [rectangle_of(each) for each in accepted.ranks]
        unit = ranks.shape.cut(gcd(ranks.shape.block_size, accepted.block_size))
        self._routes = TransferRoutes(routes(ranks.rectangles, theirs), unit)
        for route in self._routes.routes:
            pair = (route.source, route.destination)
            self._connecting.add(pair)
            self._windows[pair] = asyncio.Semaphore(WINDOW)
            self._endpoints[pair] = ranks.open(route.source, False, partial(self._on_report, pair))

    def _on_value(self, value: wire.StoreValue) -> None:
        end = self._endpoints.get((value.source_rank, value.destination_rank))
        if end is None or len(value.key) + len(value.value) > MAX_VALUE_BYTES:
            self.close("the destination sent a store value of an unknown pair or that is too large")
        else:
            end.value(value.key, value.value)

    def _on_credit(self, credit: wire.Credit) -> None:
        name = (credit.epoch, credit.index)
        message = self._announced.pop(name, None)
        if message is None or self.broken:
            self.close("the destination sent a credit for a message that was not announced")
        elif credit.discard:
            _resolve(message.sent, 0)
        else:
            # Send in the order of the credits, because the destination receives in that order.
            self._sending[name] = message
            self._endpoints[message.pair].send(message.piece)

    # ------------------------------------------------------------ reports of the ranks

    def _on_report(self, pair: PairKey, report: ranks_pb2.Report) -> None:
        match report.WhichOneof("body"):
            case "value":
                value = store_value(pair, report.value)
                self._outbox.put_nowait(wire.FromSource(value=value))
            case "met":
                self._on_connected(pair, report.met.broken)
            case "moved":
                self._on_moved(report.moved)

    def _on_connected(self, pair: PairKey, broken: str) -> None:
        self._connecting.discard(pair)
        if broken:
            self.close(broken)
        elif not self._connecting and self._routes is not None:
            _resolve(self._ready, self._routes)

    def _on_moved(self, outcome: ranks_pb2.Outcome) -> None:
        message = self._sending.pop((outcome.epoch, outcome.index), None)
        if outcome.broken:
            self.close(outcome.broken)
        if message is None:
            return
        if outcome.broken:
            _fail(message.sent, self.broken)  # the first reason, if `close` was called before
        else:
            _resolve(message.sent, outcome.bytes)

    async def _bounded(self, wait: Awaitable[T], problem: str) -> T:
        try:
            return await asyncio.wait_for(wait, self._seconds)
        except TimeoutError:
            reason = f"{problem} for {self._seconds:g} s"
            self.close(reason)
            raise PairBroken(reason) from None


def _resolve(future: asyncio.Future[T], value: T) -> None:
    with suppress(asyncio.InvalidStateError):
        future.set_result(value)


def _fail(future: asyncio.Future[T], reason: str) -> None:
    if not future.done():
        future.set_exception(PairBroken(reason))
        future.exception()  # mark as retrieved: asyncio logs exceptions that are never read
