"""Destination side of KV transfers: opens epochs and accepts connections from source workers.

All code here runs on the event loop, so commands and messages are handled one at a time. The bytes
are received by the ranks (`rank_mover`). A failure on one rank fails the whole transfer. A transfer
has ended when no rank writes into its blocks any more.
"""

import asyncio
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import gcd

import grpc

from penstock.protos import ranks_pb2, transfer_pb2_grpc
from penstock.protos import transfer_pb2 as wire
from penstock.workers.kv_transfer.rank_endpoints import (
    MAX_PEERS,
    MAX_VALUE_BYTES,
    PairKey,
    RankEndpoints,
    check_peer,
    store_value,
)
from penstock.workers.kv_transfer.rank_mover import make_piece, rectangle_of, shard_of
from penstock.workers.kv_transfer.receive_state import (
    ExpectedTransfer,
    IncomingPeer,
    IncomingTransfer,
    TransferResult,
)
from penstock.workers.kv_transfer.shards import BadShard, routes
from penstock.workers.kv_transfer.staging import PROTOCOL, WorkerIdentity, blocks_of
from penstock.workers.rank.fingerprint import layout_mismatch


@dataclass(slots=True)
class _DrainingTransfer:
    """A closed transfer into whose blocks some ranks may still be writing."""

    ranks: set[int]
    done: Callable[[TransferResult], None]
    result: TransferResult


class KvReceiver(transfer_pb2_grpc.TransferServicer):
    """Receives KV transfers. Create and use it on the event loop."""

    def __init__(self, identity: WorkerIdentity, endpoints: RankEndpoints, seconds: float) -> None:
        self._identity = identity
        self._endpoints = endpoints
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._epochs = count(1)
        self._generations = count(1)
        self._transfers: dict[int, IncomingTransfer] = {}
        self._draining: dict[int, _DrainingTransfer] = {}
        self._incoming: dict[
            str, IncomingPeer
        ] = {}  # by name of the source worker, least recently used first
        self._deadline_timer: asyncio.TimerHandle | None = None
        self.bytes_by_pair: Counter[PairKey] = Counter()
        endpoints.on_drained = self._on_drained

    @property
    def bytes_received(self) -> int:
        return self.bytes_by_pair.total()

    # ------------------------------------------------------------ called by this worker

    def open(self, expected: ExpectedTransfer, done: Callable[[TransferResult], None]) -> int:
        """Open an epoch for an expected transfer and return the epoch.

        `done` is called exactly once, on the event loop, when no rank writes the blocks any more.
        """
        epoch = next(self._epochs)
        deadline = self._loop.time() + self._seconds
        self._transfers[epoch] = IncomingTransfer(expected, done, deadline)
        if self._deadline_timer is None:
            self._deadline_timer = self._loop.call_later(self._seconds, self._check_deadlines)
        return epoch

    def close(self, epoch: int) -> None:
        """Cancel a transfer; it fails with reason "dropped" unless it has already ended."""
        self._finish(epoch, "dropped")

    def stop(self) -> None:
        """Close the connections to all sources."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        for incoming in list(self._incoming.values()):
            self._drop_peer(incoming, "the worker is stopping")

    # ------------------------------------------------------------ control channel

    async def Pair(
        self, request_iterator: AsyncIterator[wire.FromSource], context: grpc.aio.ServicerContext
    ) -> None:
        await self._authorize(context)
        introduction = await self._introduction(request_iterator, context)
        if not self._evict_idle_peer(introduction.worker):
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"already receiving from {MAX_PEERS} workers, the maximum: retry later",
            )
        incoming = self._accept_peer(introduction)
        reader = asyncio.create_task(self._read(request_iterator, incoming))
        try:
            accepted = wire.Accepted(
                generation=incoming.generation,
                backend=self._endpoints.backend,
                block_size=self._endpoints.shape.block_size,
                ranks=self._endpoints.holdings(),
            )
            await context.write(wire.FromDestination(accepted=accepted))
            while (message := await incoming.outbox.get()) is not None:
                await context.write(message)
        finally:
            reader.cancel()
            self._drop_peer(incoming, "the source closed the channel")

    async def _authorize(self, context: grpc.aio.ServicerContext) -> None:
        shown = dict(context.invocation_metadata() or ()).get("authorization", "")
        wanted = f"Bearer {self._identity.secret}"
        if not hmac.compare_digest(str(shown).encode(), wanted.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing transfer secret")

    async def _introduction(
        self, messages: AsyncIterator[wire.FromSource], context: grpc.aio.ServicerContext
    ) -> wire.Introduction:
        try:
            first = await asyncio.wait_for(anext(messages), self._seconds)
        except (TimeoutError, StopAsyncIteration):
            first = wire.FromSource()
        introduction = first.introduction
        problem = ""
        if not introduction.worker:
            problem = "the first message must be an introduction"
        elif introduction.protocol != PROTOCOL:
            problem = f"transfer protocol {introduction.protocol}, not {PROTOCOL}: upgrade one side"
        elif apart := layout_mismatch(introduction.layout, self._identity.layout):
            problem = apart
        else:
            problem = check_peer(self._endpoints, introduction)
        if problem:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        return introduction

    def _evict_idle_peer(self, worker: str) -> bool:
        """Make room for `worker`: close an idle source. Return False if all sources are busy.

        A source is busy if an open transfer expects data from it.
        """
        if worker in self._incoming or len(self._incoming) < MAX_PEERS:
            return True
        busy = {transfer.expected.source for transfer in self._transfers.values()}
        idle = [each for each in self._incoming.values() if each.source not in busy]
        if idle:
            self._drop_peer(idle[0], f"it was idle, and worker {worker} needs its slot")
        return bool(idle)

    def _accept_peer(self, introduction: wire.Introduction) -> IncomingPeer:
        """Open the rank pairs from a source; close an earlier connection of this source first."""
        earlier = self._incoming.get(introduction.worker)
        if earlier is not None:
            source_alive = earlier.source[1] == introduction.incarnation
            self._drop_peer(earlier, "the source opened another channel", source_alive)
        source = (introduction.worker, introduction.incarnation)
        unit = self._endpoints.shape.cut(
            gcd(self._endpoints.shape.block_size, introduction.block_size)
        )
        incoming = IncomingPeer(source, next(self._generations), unit, asyncio.Queue())
        self._incoming[introduction.worker] = incoming
        theirs = [rectangle_of(each) for each in introduction.ranks]
        for route in routes(theirs, self._endpoints.rectangles):
            pair = (route.source, route.destination)
            on_report = partial(self._on_report, incoming, pair)
            incoming.endpoints[pair] = self._endpoints.open(route.destination, True, on_report)
        return incoming

    def _on_report(self, incoming: IncomingPeer, pair: PairKey, report: ranks_pb2.Report) -> None:
        """Handle a rank's report about its endpoint of `pair`."""
        match report.WhichOneof("body"):
            case "value":
                value = store_value(pair, report.value)
                incoming.outbox.put_nowait(wire.FromDestination(value=value))
            case "met" if report.met.broken:
                self._drop_peer(incoming, report.met.broken)
            case "moved":
                self._on_moved(report.moved, incoming, pair)

    async def _read(self, messages: AsyncIterator[wire.FromSource], incoming: IncomingPeer) -> None:
        try:
            async for message in messages:
                if incoming.is_closed:
                    return
                match message.WhichOneof("body"):
                    case "value":
                        self._on_value(message.value, incoming)
                    case "header":
                        self._on_header(message.header, incoming)
                    case "end":
                        self._on_end(message.end, incoming)
        finally:
            incoming.outbox.put_nowait(None)

    def _on_value(self, value: wire.StoreValue, incoming: IncomingPeer) -> None:
        end = incoming.endpoints.get((value.source_rank, value.destination_rank))
        if end is None or len(value.key) + len(value.value) > MAX_VALUE_BYTES:
            self._drop_peer(
                incoming, "the source sent a store value of an unknown pair or that is too large"
            )
        else:
            end.value(value.key, value.value)

    def _drop_peer(self, incoming: IncomingPeer, reason: str, source_alive: bool = False) -> None:
        """Close a source's connection and fail the transfers that the source was sending.

        Unless `source_alive`, also fail transfers that the source has not begun to send.
        """
        if incoming.is_closed:
            return
        incoming.close()
        if self._incoming.get(incoming.source[0]) is incoming:
            del self._incoming[incoming.source[0]]
        for epoch, transfer in list(self._transfers.items()):
            expected = transfer.incoming is None and transfer.expected.source == incoming.source
            if (expected and not source_alive) or transfer.incoming is incoming:
                self._finish(epoch, f"the pair with {incoming.source[0]} broke: {reason}")

    # ------------------------------------------------------------ KV messages

    def _on_header(self, header: wire.Header, incoming: IncomingPeer) -> None:
        transfer = self._find(header.epoch, incoming)
        end = incoming.endpoints.get((header.source_rank, header.destination_rank))
        problem = "" if end is not None else "a message was announced for an unknown rank pair"
        if transfer is not None and end is not None:
            try:
                transfer.announce(header)
            except BadShard as error:
                problem = str(error)
        if transfer is not None and problem:
            self._finish(header.epoch, problem)
        discard = transfer is None or end is None or bool(problem)
        if transfer is not None and end is not None and not problem:
            transfer.deadline = self._loop.time() + self._seconds
            # Receive in the order of the credits, because the source sends in that order.
            end.receive(self._piece(header, transfer.expected, incoming.unit.block_size))
        credit = wire.Credit(epoch=header.epoch, index=header.index, discard=discard)
        incoming.outbox.put_nowait(wire.FromDestination(credit=credit))

    def _piece(self, header: wire.Header, expected: ExpectedTransfer, unit: int) -> ranks_pb2.Piece:
        shard, block_size = shard_of(header), self._endpoints.shape.block_size
        blocks = blocks_of(shard, expected.blocks, expected.start, block_size)
        return make_piece(header.epoch, header.index, blocks, shard, unit)

    def _find(self, epoch: int, incoming: IncomingPeer) -> IncomingTransfer | None:
        """Return the open transfer of `epoch`; None if `incoming` is not its source."""
        transfer = self._transfers.get(epoch)
        if transfer is None or transfer.expected.source != incoming.source:
            return None
        if transfer.incoming is None:
            transfer.begin(incoming, self._endpoints.rectangles)
        name = incoming.source[0]
        if self._incoming.get(name) is incoming:  # move to the end: most recently used
            self._incoming[name] = self._incoming.pop(name)
        return transfer if transfer.incoming is incoming else None

    def _on_moved(self, outcome: ranks_pb2.Outcome, incoming: IncomingPeer, pair: PairKey) -> None:
        transfer = self._transfers.get(outcome.epoch)
        if transfer is not None and transfer.incoming is incoming:
            transfer.receiving[pair[1]] -= 1
        if outcome.broken:
            self._drop_peer(incoming, outcome.broken)
            return
        if transfer is None or transfer.incoming is not incoming:
            return
        if outcome.problem:
            self._finish(outcome.epoch, outcome.problem)
            return
        transfer.deadline = self._loop.time() + self._seconds
        rank, shard = transfer.pieces[outcome.index]
        transfer.coverages[rank].fill(shard)
        transfer.num_bytes += outcome.bytes
        self.bytes_by_pair[pair] += outcome.bytes
        if transfer.complete:
            self._finish(outcome.epoch, "")

    def _on_end(self, end: wire.End, incoming: IncomingPeer) -> None:
        transfer = self._find(end.epoch, incoming)
        if transfer is not None and end.aborted:
            self._finish(end.epoch, "the source gave up")
        elif transfer is not None and not transfer.announced:
            self._finish(end.epoch, "the source ended before everything was sent")

    def _finish(self, epoch: int, reason: str) -> None:
        """Close the epoch; an empty `reason` means that all ranks have received everything."""
        transfer = self._transfers.pop(epoch, None)
        if transfer is None:
            return
        if transfer.incoming is not None:
            outcome = wire.Outcome(epoch=epoch, received=not reason, reason=reason)
            transfer.incoming.outbox.put_nowait(wire.FromDestination(outcome=outcome))
        verdict = TransferResult(epoch, transfer.num_bytes, reason)
        writing = {rank for rank, num in transfer.receiving.items() if num}
        if writing:
            self._draining[epoch] = _DrainingTransfer(writing, transfer.done, verdict)
        else:
            self._loop.call_soon(transfer.done, verdict)
        for rank in transfer.receiving:
            self._endpoints.drain(rank, epoch)

    def _on_drained(self, rank: int, epoch: int) -> None:
        """Record that `rank` no longer writes blocks of `epoch`; report after the last rank."""
        settling = self._draining.get(epoch)
        if settling is None:
            return
        settling.ranks.discard(rank)
        if not settling.ranks:
            del self._draining[epoch]
            settling.done(settling.result)

    def _check_deadlines(self) -> None:
        """Fail transfers that have made no progress within the timeout."""
        now = self._loop.time()
        for epoch, transfer in list(self._transfers.items()):
            if transfer.deadline <= now:
                self._finish(epoch, f"nothing came for {self._seconds:g} s")
        deadlines = [transfer.deadline for transfer in self._transfers.values()]
        self._deadline_timer = (
            self._loop.call_at(min(deadlines), self._check_deadlines) if deadlines else None
        )
