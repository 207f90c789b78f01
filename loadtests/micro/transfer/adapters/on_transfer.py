"""Adapter for `workers/transfer`, the package of older trees such as commit 61ff4b3.

The classes and methods are those of `on_kv_transfer`.
"""

from collections.abc import Callable
from typing import Any

import torch
from penstock.workers.transfer import source
from penstock.workers.transfer.destination import Destination as KvDestination
from penstock.workers.transfer.ends import Ends
from penstock.workers.transfer.incoming import Expected
from penstock.workers.transfer.link import Peer
from penstock.workers.transfer.mover import Movers, RankMover
from penstock.workers.transfer.shards import Rectangle
from penstock.workers.transfer.staging import Identity, KvStaging
from penstock.workers.warm_up import warm_up_moves

MESSAGE_BYTES = source.MESSAGE_BYTES
SOURCE, DESTINATION = ("source", "i"), ("destination", "i")
SECRET = "transfer"


class Source:
    def __init__(self, kv: torch.Tensor, host: str, seconds: float) -> None:
        identity = Identity(*SOURCE, "layout", host, "")
        self._source = source.Source(identity, _ends(kv, host, seconds), seconds)

    async def send(self, address: str, epoch: int, num_tokens: int, blocks: Any) -> None:
        outgoing = source.Outgoing("router", 1, 1, epoch, 0, num_tokens, blocks)
        await self._source.send(Peer(*DESTINATION, address, SECRET), outgoing, lambda: None)

    def stop(self) -> None:
        self._source.stop()


class Destination:
    def __init__(
        self, kv: torch.Tensor, host: str, seconds: float, done: Callable[[str, int], None]
    ) -> None:
        identity = Identity(*DESTINATION, "layout", host, SECRET)
        self.servicer = KvDestination(identity, _ends(kv, host, seconds), seconds)
        self._done = done

    def open(self, num_tokens: int, blocks: Any) -> int:
        expected = Expected("router", 1, 1, SOURCE, 0, num_tokens, blocks)
        epoch: int = self.servicer.open(
            expected, lambda verdict: self._done(verdict.reason, verdict.num_bytes)
        )
        return epoch

    def stop(self) -> None:
        self.servicer.stop()


def _ends(kv: torch.Tensor, host: str, seconds: float) -> Any:
    warm_up_moves(kv)
    whole = Rectangle(0, kv.shape[0], 0, kv.shape[3])
    return Ends(Movers(RankMover(KvStaging(kv, whole), host, seconds)))
