"""Between a rank's paged cache and the flat messages that travel; and who a side of a pair is."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from penstock.kernels.blocks import gather_blocks, scatter_blocks
from penstock.workers.scheduling.sequence import Ints
from penstock.workers.transfer.shards import BlockShape, Rectangle, Shard

PROTOCOL = 1  # of protos/transfer.proto


@dataclass(frozen=True, slots=True)
class Identity:
    """One worker, as its peers see it."""

    worker: str
    incarnation: str
    layout: str
    host: str
    secret: str = field(repr=False)


class KvStaging:
    """Packs rectangles of cache blocks into messages and back.

    `kv` is this rank's whole cache, [layers, 2, blocks, KV heads, block_size, head_dim]: the layers
    and heads of `rectangle` out of the model's. Of latent attention: one side, and one head.
    """

    def __init__(self, kv: torch.Tensor, rectangle: Rectangle) -> None:
        _, num_sides, _, _, block_size, head_dim = kv.shape
        self._kv = kv
        self.device = kv.device
        self.rectangle = rectangle
        self.shape = BlockShape(block_size, num_sides * block_size * head_dim * kv.element_size())

    def gather(self, blocks: Ints, shard: Shard) -> torch.Tensor:
        """Bytes [num_bytes] uint8 of the message, copied out of `blocks`, its own."""
        layers, heads = self._slices(shard.rectangle)
        indices = torch.from_numpy(blocks).to(self.device)
        return gather_blocks(self._kv, indices, layers, heads).view(-1).view(torch.uint8)

    def scatter(self, blocks: Ints, shard: Shard, data: torch.Tensor) -> None:
        """Copy a message's bytes [num_bytes] uint8 into `blocks`; in when it returns."""
        layers, heads = self._slices(shard.rectangle)
        indices = torch.from_numpy(blocks).to(self.device)
        staged = self.viewed(data, blocks, shard.rectangle)
        scatter_blocks(self._kv, indices, layers, heads, staged)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def num_bytes(self, blocks: Ints, part: Rectangle) -> int:
        """Of a message with that part of these blocks."""
        return len(blocks) * part.area * self.shape.bytes_per_head

    def room(self, blocks: Ints, part: Rectangle) -> torch.Tensor:
        """Room for such a message, [layers, sides, n, heads, block_size, head_dim]."""
        return self.viewed(self.empty(self.num_bytes(blocks, part)), blocks, part)

    def viewed(self, data: torch.Tensor, blocks: Ints, part: Rectangle) -> torch.Tensor:
        """A message's bytes [num_bytes] as [layers, sides, n, heads, block_size, head_dim]."""
        _, num_sides, _, _, block_size, head_dim = self._kv.shape
        num_layers = part.last_layer - part.first_layer
        num_heads = part.last_head - part.first_head
        shape = (num_layers, num_sides, len(blocks), num_heads, block_size, head_dim)
        return data.view(self._kv.dtype).view(shape)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Room for a message."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _slices(self, part: Rectangle) -> tuple[slice, slice]:
        own = self.rectangle
        layers = slice(part.first_layer - own.first_layer, part.last_layer - own.first_layer)
        heads = slice(part.first_head - own.first_head, part.last_head - own.first_head)
        return layers, heads


class Staging(Protocol):
    """What packs a worker's blocks: `KvStaging`, or what has several ranks behind it."""

    device: torch.device
    shape: BlockShape
    rectangle: Rectangle

    def gather(self, blocks: Ints, shard: Shard) -> torch.Tensor: ...
    def scatter(self, blocks: Ints, shard: Shard, data: torch.Tensor) -> None: ...
    def empty(self, num_bytes: int) -> torch.Tensor: ...


def blocks_of(shard: Shard, blocks: Ints, start: int, block_size: int) -> Ints:
    """Those of `blocks`, which cover positions from `start` on, that the message covers."""
    first = (shard.start - start) // block_size
    return blocks[first : first + shard.num_blocks(block_size)]
