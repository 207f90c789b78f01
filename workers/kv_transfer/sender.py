"""Source side of KV transfers: sends a lease's blocks over the channels to other workers.

`PeerChannel` sends over one channel; the code here opens and closes the channels. Each rank gathers
and sends its own shard (`rank_mover`).
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from penstock.workers.kv_transfer.peer_channel import Peer, PeerChannel
from penstock.workers.kv_transfer.protocol.messages import MAX_PEERS, PairKey
from penstock.workers.kv_transfer.protocol.send import OutgoingTransfer
from penstock.workers.kv_transfer.rank_endpoints import RankEndpoints
from penstock.workers.kv_transfer.staging import WorkerIdentity
from penstock.workers.kv_transfer.transport import PairBroken
from penstock.workers.kv_transfer.verification import MESSAGE_BYTES as MESSAGE_BYTES


class KvSender:
    """Sends KV transfers. Create and use it on the event loop."""

    def __init__(self, identity: WorkerIdentity, endpoints: RankEndpoints, seconds: float) -> None:
        self._identity = identity
        self._endpoints = endpoints
        self._seconds = seconds
        self._channels: dict[
            str, PeerChannel
        ] = {}  # by name of the destination worker, least recently used first
        self._channel_idle = asyncio.Event()  # set when a channel may have become idle
        self.bytes_by_pair: Counter[PairKey] = Counter()

    @property
    def bytes_sent(self) -> int:
        return self.bytes_by_pair.total()

    async def send(
        self, peer: Peer, outgoing: OutgoingTransfer, on_read: Callable[[], None]
    ) -> None:
        """Send a transfer; always call `on_read` when no rank reads the blocks any more.

        Raises:
            PairBroken: The connection failed; the destination may still expect the transfer.
        """
        try:
            channel = await self._find_or_open(peer)
        except BaseException:
            on_read()
            raise
        await channel.send(outgoing, MESSAGE_BYTES, on_read)

    async def refuse(self, peer: Peer, epoch: int) -> None:
        """Send an abort to the destination. Raises `PairBroken` if it is unreachable."""
        await self.send(peer, OutgoingTransfer.aborting(epoch), lambda: None)

    def stop(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            channel.close("the worker is stopping")

    async def _find_or_open(self, peer: Peer) -> PeerChannel:
        """Return the channel to a worker, and open it if needed."""
        channel = self._find(peer)
        if channel is None:
            await self._wait_for_slot()
            # Another task may have opened the channel while this task waited.
            channel = self._find(peer) or self._new_channel(peer)
        self._channels[peer.worker] = channel
        return channel

    def _new_channel(self, peer: Peer) -> PeerChannel:
        return PeerChannel(
            self._identity,
            peer,
            self._endpoints,
            self._seconds,
            self.bytes_by_pair,
            self._channel_idle.set,
        )

    def _find(self, peer: Peer) -> PeerChannel | None:
        """Remove and return the channel to `peer`, or close it if it is broken or outdated."""
        channel = self._channels.pop(peer.worker, None)
        if channel is not None and (channel.broken or channel.peer != peer):
            channel.close(f"worker {peer.worker} has restarted or changed its address")
            return None
        return channel

    async def _wait_for_slot(self) -> None:
        """Make room for one more channel; if all channels are busy, wait until one becomes idle."""
        try:
            async with asyncio.timeout(self._seconds):
                while not self._evict():
                    self._channel_idle.clear()
                    await self._channel_idle.wait()
        except TimeoutError:
            reason = f"all {MAX_PEERS} channels to other workers are busy for {self._seconds:g} s"
            raise PairBroken(reason) from None

    def _evict(self) -> bool:
        for name, channel in list(self._channels.items()):
            if channel.broken and channel.idle:
                del self._channels[name]
        if len(self._channels) < MAX_PEERS:
            return True
        idle = [name for name, channel in self._channels.items() if channel.idle]
        if idle:
            reason = "it was idle, and another destination needs its slot"
            self._channels.pop(idle[0]).close(reason)
        return bool(idle)
