"""The KV blocks of a worker of several ranks, as if rank 0 had them all.

What another rank has of them travels over a communicator of the hosts, when it is told so. It is
told in the same line as step plans, and obeys in order: so it writes into a block before any step
that may read it, and reads one before any step that may write to it.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from penstock.workers.parallel.communicator import Communicator, connect, plain
from penstock.workers.parallel.group import RankLost
from penstock.workers.parallel.mesh import Place
from penstock.workers.parallel.plans import MoveBlocks
from penstock.workers.scheduling.sequence import Ints
from penstock.workers.transfer.shards import Rectangle, Shard
from penstock.workers.transfer.staging import KvStaging


class BlockLine:
    """This rank's end of the communicator that blocks travel over."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def send(self, data: Tensor, rank: int) -> None:
        """Bytes on any device; they may be changed when it returns."""
        host = data.cpu()
        self._do(lambda: self._communicator.send([host], rank, 0).wait())

    def receive(self, num_bytes: int, rank: int) -> Tensor:
        """[num_bytes] uint8, on the host."""
        host = torch.empty(num_bytes, dtype=torch.uint8)
        self._do(lambda: self._communicator.recv([host], rank, 0).wait())
        return host

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except RuntimeError as error:
            raise RankLost(plain(error)) from error


def connect_blocks(store: Store, place: Place, host: str, seconds: float) -> BlockLine:
    """Meet the others; waits for them."""
    prefixed, num_ranks = PrefixStore("blocks", store), place.mesh.num_ranks
    return BlockLine(connect("gloo", prefixed, place.rank, num_ranks, host, seconds))


class SpreadStaging:
    """As `KvStaging`, of the whole model: for the leading rank. Its methods may be called from any
    thread; they wait for other ranks.

    own: what this rank has; rectangles: what each rank has, this one's first; tell: says something
    to all of them.
    """

    def __init__(
        self,
        own: KvStaging,
        rectangles: Sequence[Rectangle],
        line: BlockLine,
        tell: Callable[[bytes], None],
    ) -> None:
        self._own = own
        self._rectangles = rectangles
        self._line = line
        self._tell = tell
        self._lock = threading.Lock()  # what is told first travels first
        self.device = own.device
        self.shape = own.shape
        num_layers = max(each.last_layer for each in rectangles)
        self.rectangle = Rectangle(0, num_layers, 0, max(each.last_head for each in rectangles))

    def gather(self, blocks: Ints, shard: Shard) -> Tensor:
        whole = self._own.room(blocks, shard.rectangle)
        asked = dict.fromkeys(self._rectangles)  # of what several have, the first is asked
        for rectangle in asked:
            part = rectangle.intersect(shard.rectangle)
            if part is not None:
                data = self._fetch(self._rectangles.index(rectangle), blocks, part, shard)
                _within(whole, shard.rectangle, part).copy_(self._own.viewed(data, blocks, part))
        return whole.view(-1).view(torch.uint8)

    def scatter(self, blocks: Ints, shard: Shard, data: Tensor) -> None:
        whole = self._own.viewed(data, blocks, shard.rectangle)
        for rank, rectangle in enumerate(self._rectangles):
            part = rectangle.intersect(shard.rectangle)
            if part is not None:
                piece = _within(whole, shard.rectangle, part).contiguous()
                self._give(rank, blocks, part, shard, piece.view(-1).view(torch.uint8))

    def empty(self, num_bytes: int) -> Tensor:
        return self._own.empty(num_bytes)

    def _fetch(self, rank: int, blocks: Ints, part: Rectangle, shard: Shard) -> Tensor:
        if rank == 0:
            return self._own.gather(blocks, Shard(part, shard.start, shard.stop))
        with self._lock:
            self._tell(MoveBlocks(rank, blocks, part, take=False).encode())
            data = self._line.receive(self._own.num_bytes(blocks, part), rank)
        return data.to(self.device)

    def _give(self, rank: int, blocks: Ints, part: Rectangle, shard: Shard, data: Tensor) -> None:
        if rank == 0:
            self._own.scatter(blocks, Shard(part, shard.start, shard.stop), data)
            return
        with self._lock:
            self._tell(MoveBlocks(rank, blocks, part, take=True).encode())
            self._line.send(data, rank)


def move(order: MoveBlocks, own: KvStaging, line: BlockLine) -> None:
    """What the leading rank told this one to do."""
    size = own.shape.block_size
    shard = Shard(order.part, 0, len(order.blocks) * size)
    if order.take:
        data = line.receive(own.num_bytes(order.blocks, order.part), 0)
        own.scatter(order.blocks, shard, data.to(own.device))
    else:
        line.send(own.gather(order.blocks, shard), 0)


def _within(whole: Tensor, around: Rectangle, part: Rectangle) -> Tensor:
    """A part of [layers, sides, n, heads, block_size, head_dim], which is of `around`."""
    layers = slice(part.first_layer - around.first_layer, part.last_layer - around.first_layer)
    heads = slice(part.first_head - around.first_head, part.last_head - around.first_head)
    return whole[layers, :, :, heads]
