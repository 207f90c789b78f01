"""Destination side of KV transfers: serves the control channels of the source workers.

`ReceiveProtocol` makes all decisions. This module runs on the event loop. It passes messages of the
sources and reports of the ranks to the protocol, and executes the protocol's commands. The bytes
are received by the ranks (`rank_mover`).
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

import grpc
from google.protobuf.message import DecodeError

from penstock.protos import ranks_pb2, transfer_pb2_grpc
from penstock.protos import transfer_pb2 as wire
from penstock.workers.kv_transfer.codec import (
    decode_end,
    decode_header,
    decode_moved,
    encode_from_destination,
    holdings,
    rectangle_of,
    store_value,
)
from penstock.workers.kv_transfer.protocol.messages import MAX_PEERS, End, Header, PairKey
from penstock.workers.kv_transfer.protocol.receive import (
    CloseSource,
    DrainRank,
    ExpectedTransfer,
    Finished,
    IncomingPeer,
    ReceiveCommand,
    ReceivePiece,
    ReceiveProtocol,
    Reply,
    TransferResult,
)
from penstock.workers.kv_transfer.rank_endpoints import (
    MAX_VALUE_BYTES,
    RankEndpoint,
    RankEndpoints,
    check_peer,
)
from penstock.workers.kv_transfer.staging import PROTOCOL, WorkerIdentity
from penstock.workers.kv_transfer.verification import max_data_bytes
from penstock.workers.rank.fingerprint import layout_mismatch

# limit of queued messages per source; a source that exceeds the limit is closed
MAX_MESSAGES_WAITING = 1 << 12


@dataclass(slots=True)
class _SourceChannel:
    """The control channel and the rank pairs of a connected source.

    Attributes:
        ended: set when the channel stops accepting messages.
    """

    endpoints: dict[PairKey, RankEndpoint] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _outbox: asyncio.Queue[wire.FromDestination | None] = field(default_factory=asyncio.Queue)

    def put(self, message: wire.FromDestination) -> None:
        """Queue a message; end the channel instead if the source does not read its messages."""
        if self._outbox.qsize() >= MAX_MESSAGES_WAITING:
            self.end()
        elif not self.ended.is_set():
            self._outbox.put_nowait(message)

    def end(self) -> None:
        """End the channel after the queued messages."""
        if not self.ended.is_set():
            self.ended.set()
            self._outbox.put_nowait(None)

    def close(self) -> None:
        for end in self.endpoints.values():
            end.close()
        self.end()

    async def write(self, context: grpc.aio.ServicerContext) -> None:
        """Write the messages until the channel ends, or the source disconnects."""
        try:
            while (message := await self._outbox.get()) is not None:
                await context.write(message)
        except grpc.aio.InternalError:
            pass
        finally:
            self.ended.set()


class KvReceiver(transfer_pb2_grpc.TransferServicer):
    """Receives KV transfers from authorized workers. Create and use it on the event loop."""

    def __init__(self, identity: WorkerIdentity, endpoints: RankEndpoints, seconds: float) -> None:
        self._identity = identity
        self._endpoints = endpoints
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        shape, rectangles = endpoints.shape, endpoints.rectangles
        limit = max_data_bytes(endpoints.backend)
        sizes = [shape.max_bytes(each, limit) for each in rectangles]
        self._protocol = ReceiveProtocol(shape, rectangles, seconds, sizes)
        # control channels by generation of the source
        self._channels: dict[int, _SourceChannel] = {}
        self._callbacks: dict[int, Callable[[TransferResult], None]] = {}  # by epoch
        self._deadline_timer: asyncio.TimerHandle | None = None
        endpoints.on_drained = self._on_drained

    @property
    def bytes_by_pair(self) -> Counter[PairKey]:
        return self._protocol.bytes_by_pair

    @property
    def bytes_received(self) -> int:
        return self.bytes_by_pair.total()

    # ------------------------------------------------------------ called by this worker

    def open(self, expected: ExpectedTransfer, done: Callable[[TransferResult], None]) -> int:
        """Open an epoch for an expected transfer and return the epoch.

        `done` is called exactly once, on the event loop, after all ranks have stopped writing.
        """
        epoch = self._protocol.open(expected, self._loop.time())
        self._callbacks[epoch] = done
        if self._deadline_timer is None:
            self._deadline_timer = self._loop.call_later(self._seconds, self._check_deadlines)
        return epoch

    def close(self, epoch: int) -> None:
        """Cancel a transfer; it fails with reason "dropped" unless it has already ended."""
        self._protocol.close(epoch)
        self._execute()

    def stop(self) -> None:
        """Close the connections to all sources."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._protocol.stop()
        self._execute()

    # ------------------------------------------------------------ control channel

    async def Pair(
        self, request_iterator: AsyncIterator[wire.FromSource], context: grpc.aio.ServicerContext
    ) -> None:
        introduction = await self._introduction(request_iterator, context)
        peer = self._accept(introduction)
        if peer is None:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"already receiving from {MAX_PEERS} workers, the maximum: retry later",
            )
            return
        channel = self._channels[peer.generation]
        accepted = wire.Accepted(
            generation=peer.generation,
            backend=self._endpoints.backend,
            block_size=self._endpoints.shape.block_size,
            ranks=holdings(self._endpoints.rectangles),
        )
        channel.put(wire.FromDestination(accepted=accepted))
        reader = asyncio.create_task(self._read(request_iterator, peer.generation, channel))
        writer = asyncio.create_task(channel.write(context))
        try:
            await channel.ended.wait()
        finally:
            reader.cancel()
            self._disconnect(peer.generation, "the source closed the channel, or does not read it")
        await writer

    async def _introduction(
        self, messages: AsyncIterator[wire.FromSource], context: grpc.aio.ServicerContext
    ) -> wire.Introduction:
        try:
            first = await asyncio.wait_for(anext(messages), self._seconds)
        except (TimeoutError, StopAsyncIteration, DecodeError):
            first = wire.FromSource()
        introduction = first.introduction
        problem = ""
        if not introduction.worker:
            problem = "the first message must be an Introduction with the name of the worker"
        elif introduction.protocol != PROTOCOL:
            problem = (
                f"the source has transfer protocol {introduction.protocol} and this worker "
                f"{PROTOCOL}: run the same version of both"
            )
        elif apart := layout_mismatch(introduction.layout, self._identity.layout):
            problem = apart
        else:
            problem = check_peer(self._endpoints, introduction)
        if problem:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        return introduction

    def _accept(self, introduction: wire.Introduction) -> IncomingPeer | None:
        """Connect a source and open its rank pairs; return None if there is no free slot."""
        source = (introduction.worker, introduction.incarnation)
        theirs = [rectangle_of(each) for each in introduction.ranks]
        early = introduction.early
        peer = self._protocol.connect(source, introduction.block_size, theirs, early)
        self._execute()
        if peer is not None:
            channel = self._channels[peer.generation] = _SourceChannel()
            for pair in sorted(peer.pairs):
                on_report = partial(self._on_report, peer.generation, pair)
                channel.endpoints[pair] = self._endpoints.open(pair[1], True, on_report)
        return peer

    def _disconnect(self, generation: int, reason: str) -> None:
        self._protocol.disconnect(generation, reason)
        self._execute()

    async def _read(
        self,
        messages: AsyncIterator[wire.FromSource],
        generation: int,
        channel: _SourceChannel,
    ) -> None:
        try:
            async for message in messages:
                match message.WhichOneof("body"):
                    case "value":
                        self._on_value(message.value, generation)
                    case "header":
                        self._on_message(decode_header(message.header), generation)
                    case "end":
                        self._on_message(decode_end(message.end), generation)
        except DecodeError:
            self._disconnect(generation, "the source sent a malformed message")
        finally:
            channel.end()

    def _on_value(self, value: wire.StoreValue, generation: int) -> None:
        channel = self._channels.get(generation)
        if channel is None:
            return
        end = channel.endpoints.get((value.source_rank, value.destination_rank))
        if end is None or len(value.key) + len(value.value) > MAX_VALUE_BYTES:
            problem = "the source sent a store value that is too large or of an unknown rank pair"
            self._disconnect(generation, problem)
        else:
            end.value(value.key, value.value)

    def _on_message(self, message: Header | End, generation: int) -> None:
        self._protocol.on_message(generation, message, self._loop.time())
        self._execute()

    # ------------------------------------------------------------ reports of the ranks

    def _on_report(self, generation: int, pair: PairKey, report: ranks_pb2.Report) -> None:
        """Handle a rank's report about its endpoint of `pair`."""
        match report.WhichOneof("body"):
            case "value" if generation in self._channels:
                value = wire.FromDestination(value=store_value(pair, report.value))
                self._channels[generation].put(value)
            case "met" if report.met.broken:
                self._disconnect(generation, report.met.broken)
            case "moved":
                moved = decode_moved(report.moved)
                self._protocol.on_moved(generation, pair, moved, self._loop.time())
                self._execute()

    def _on_drained(self, rank: int, epoch: int) -> None:
        self._protocol.on_drained(rank, epoch)
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

    def _execute_one(self, command: ReceiveCommand) -> None:
        match command:
            case Reply(generation, message):
                reply = encode_from_destination(message)
                self._channels[generation].put(reply)
            case ReceivePiece(generation, pair, piece):
                self._channels[generation].endpoints[pair].receive(piece)
            case DrainRank(rank, epoch):
                self._endpoints.drain(rank, epoch)
            case CloseSource(generation):
                self._channels.pop(generation).close()
            case Finished(result):
                # Defer the callback, so that it does not run inside a call of `open` or `close`.
                self._loop.call_soon(self._callbacks.pop(result.epoch), result)
