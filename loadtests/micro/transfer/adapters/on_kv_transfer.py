"""Adapter for `workers/kv_transfer`, the package for KV transfers in this tree."""

from collections.abc import Callable

import torch

from penstock.workers.engine.warm_up import warm_up_block_moves
from penstock.workers.kv_transfer import sender
from penstock.workers.kv_transfer.protocol.messages import Peer
from penstock.workers.kv_transfer.protocol.receive import ExpectedTransfer, TransferResult
from penstock.workers.kv_transfer.protocol.send import OutgoingTransfer
from penstock.workers.kv_transfer.rank_endpoints import RankEndpoints
from penstock.workers.kv_transfer.rank_mover import Movers, RankMover
from penstock.workers.kv_transfer.receiver import KvReceiver
from penstock.workers.kv_transfer.sender import KvSender
from penstock.workers.kv_transfer.shards import LayerHeadRange
from penstock.workers.kv_transfer.staging import KvStaging, WorkerIdentity
from penstock.workers.scheduling.sequence import Ints

# Older trees with this package have a constant instead of a function.
MESSAGE_BYTES = getattr(sender, "MESSAGE_BYTES", 0) or sender.max_data_bytes("gloo")
SOURCE, DESTINATION = ("source", "i"), ("destination", "i")
SECRET = "transfer"


class Source:
    """The worker that sends blocks."""

    def __init__(self, kv: torch.Tensor, host: str, seconds: float) -> None:
        identity = WorkerIdentity(*SOURCE, "layout", host, "")
        self._sender = KvSender(identity, _endpoints(kv, host, seconds), seconds)

    async def send(self, address: str, epoch: int, num_tokens: int, blocks: Ints) -> None:
        """Send the KV of the first `num_tokens` positions, held in `blocks`, to a destination."""
        outgoing = OutgoingTransfer("router", 1, 1, epoch, 0, num_tokens, blocks)
        peer = Peer(*DESTINATION, address, SECRET)
        await self._sender.send(peer, outgoing, lambda: None)

    def stop(self) -> None:
        self._sender.stop()


class Destination:
    """The worker that receives blocks.

    `done` gets the reason of a failure (or "") and the number of received bytes.
    """

    def __init__(
        self, kv: torch.Tensor, host: str, seconds: float, done: Callable[[str, int], None]
    ) -> None:
        identity = WorkerIdentity(*DESTINATION, "layout", host, SECRET)
        self.servicer = KvReceiver(identity, _endpoints(kv, host, seconds), seconds)
        self._done = done

    def open(self, num_tokens: int, blocks: Ints) -> int:
        """Expect a transfer into `blocks` and return its epoch."""

        def done(result: TransferResult) -> None:
            self._done(result.reason, result.num_bytes)

        expected = ExpectedTransfer("router", 1, 1, SOURCE, 0, num_tokens, blocks)
        return self.servicer.open(expected, done)

    def stop(self) -> None:
        self.servicer.stop()


def _endpoints(kv: torch.Tensor, host: str, seconds: float) -> RankEndpoints:
    warm_up_block_moves(kv)
    whole = LayerHeadRange(0, kv.shape[0], 0, kv.shape[3])
    return RankEndpoints(Movers(RankMover(KvStaging(kv, whole), host, seconds)))
