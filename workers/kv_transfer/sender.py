"""Source side of KV transfers: sends a lease's blocks over the channels to other workers.

`PeerTable` decides which channels to open (some before their first transfer) and which to close.
This module opens and closes them. `PeerChannel` sends over one channel. Each rank gathers and sends
its own shard (`rank_mover`).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from penstock.workers.kv_transfer.peer_channel import PeerChannel
from penstock.workers.kv_transfer.protocol.messages import MAX_PEERS, PairKey, Peer
from penstock.workers.kv_transfer.protocol.peer_table import PeerTable
from penstock.workers.kv_transfer.protocol.send import OutgoingTransfer
from penstock.workers.kv_transfer.rank_endpoints import RankEndpoints
from penstock.workers.kv_transfer.staging import WorkerIdentity
from penstock.workers.kv_transfer.transport import PairBroken
from penstock.workers.kv_transfer.verification import max_data_bytes as max_data_bytes

log = logging.getLogger(__name__)


class KvSender:
    """Sends KV transfers. Create and use it on the event loop."""

    def __init__(self, identity: WorkerIdentity, endpoints: RankEndpoints, seconds: float) -> None:
        self._identity = identity
        self._endpoints = endpoints
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._table: PeerTable[PeerChannel] = PeerTable()
        self._channel_idle = asyncio.Event()  # set when a channel may have become idle
        self._check: asyncio.Handle | None = None  # the scheduled call of `_check_peers`
        self._stopped = False
        self.bytes_by_pair: Counter[PairKey] = Counter()

    @property
    def bytes_sent(self) -> int:
        return self.bytes_by_pair.total()

    def channels(self) -> Sequence[PeerChannel]:
        """Return all channels, least recently used first."""
        return self._table.connections()

    async def send(
        self, peer: Peer, outgoing: OutgoingTransfer, on_read: Callable[[], None]
    ) -> None:
        """Send a transfer; call `on_read`, also on failure, when no rank reads the blocks any more.

        Raises:
            PairBroken: The connection failed; the destination may still expect the transfer.
        """
        try:
            channel = await self._find_or_open(peer)
        except BaseException:
            on_read()
            raise
        await channel.send(outgoing, max_data_bytes(self._endpoints.backend), on_read)

    async def refuse(self, peer: Peer, epoch: int) -> None:
        """Send an abort to the destination. Raises `PairBroken` if it is unreachable."""
        await self.send(peer, OutgoingTransfer.aborting(epoch), lambda: None)

    def set_peers(self, stream: object, peers: Sequence[Peer]) -> None:
        """Replace the peers that a router's stream listed, and start to connect to the new ones.

        If a peer does not answer, log the failure and try again later.
        """
        self._table.set_peers(
            stream, [each for each in peers if each.worker != self._identity.worker]
        )
        self._check_soon()

    def forget_peers(self, stream: object) -> None:
        """Drop the peers of a router's stream that has ended; channels to them stay open."""
        self._table.forget(stream)

    def stop(self) -> None:
        """Close all channels."""
        self._stopped = True
        if self._check is not None:
            self._check.cancel()
        for channel in self._table.connections():
            channel.close("the worker is stopping")

    # ------------------------------------------------------------ channels

    async def _find_or_open(self, peer: Peer) -> PeerChannel:
        """Return the channel to a worker, connected or not; open a channel if there is none."""
        deadline = self._loop.time() + self._seconds
        while True:
            # Another task may have opened the channel while this task waited.
            channel = self._table.use(peer)
            if channel is not None:
                return channel
            has_slot, replaced = self._table.make_slot(peer)
            if replaced is not None and replaced.peer.worker == peer.worker:
                replaced.close(f"worker {peer.worker} has restarted or changed its address")
            elif replaced is not None:
                replaced.close("it was idle, and another destination needs its slot")
            if has_slot:
                return self._open(peer)
            await self._wait_for_idle_channel(deadline)

    def _open(self, peer: Peer, early: bool = False) -> PeerChannel:
        channel = PeerChannel(
            self._identity,
            peer,
            self._endpoints,
            self._seconds,
            self.bytes_by_pair,
            self._on_idle,
            early,
        )
        self._table.add(channel)
        return channel

    async def _wait_for_idle_channel(self, deadline: float) -> None:
        self._channel_idle.clear()
        try:
            async with asyncio.timeout_at(deadline):
                await self._channel_idle.wait()
        except TimeoutError:
            reason = f"all {MAX_PEERS} channels to other workers were busy for {self._seconds:g} s"
            raise PairBroken(reason) from None

    # ------------------------------------------------------------ early channels

    def _on_idle(self) -> None:
        self._channel_idle.set()
        self._check_soon()

    def _check_soon(self) -> None:
        """Call `_check_peers` after the current callback, because a channel may be running it."""
        if self._check is not None:
            self._check.cancel()
        if not self._stopped:
            self._check = self._loop.call_soon(self._check_peers)

    def _check_peers(self) -> None:
        due = self._table.due(self._loop.time())
        for channel, reason in due.closing:
            channel.close(reason)
        for failure in due.failures:
            log.warning(
                "no connection for KV transfers to worker %s: %s; next attempt in %g s",
                *(failure.peer.worker, failure.reason, failure.retry_seconds),
            )
        for peer in due.opening:
            self._open(peer, early=True)
        if self._check is not None:  # `close` above may have scheduled a check through `_on_idle`
            self._check.cancel()
        self._check = None
        if due.next_check is not None:
            self._check = self._loop.call_at(due.next_check, self._check_peers)
