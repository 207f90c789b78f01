"""Between a rank's paged cache and the flat messages that travel; and who a side of a pair is."""

from dataclasses import dataclass, field

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
        _, num_sides, _, _, block_size, head_dim = self._kv.shape
        num_layers, num_heads = layers.stop - layers.start, heads.stop - heads.start
        shape = (num_layers, num_sides, len(blocks), num_heads, block_size, head_dim)
        indices = torch.from_numpy(blocks).to(self.device)
        staged = data.view(self._kv.dtype).view(shape)
        scatter_blocks(self._kv, indices, layers, heads, staged)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Room for a message."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _slices(self, part: Rectangle) -> tuple[slice, slice]:
        own = self.rectangle
        layers = slice(part.first_layer - own.first_layer, part.last_layer - own.first_layer)
        heads = slice(part.first_head - own.first_head, part.last_head - own.first_head)
        return layers, heads


def blocks_of(shard: Shard, blocks: Ints, start: int, block_size: int) -> Ints:
    """Those of `blocks`, which cover positions from `start` on, that the message covers."""
    first = (shard.start - start) // block_size
    return blocks[first : first + shard.num_blocks(block_size)]
