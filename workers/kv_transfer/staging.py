"""Copies KV between a rank's paged cache and flat message buffers; defines `WorkerIdentity`."""

from dataclasses import dataclass, field

import torch

from penstock.kernels.kv_cache.block_copy import gather_blocks, scatter_blocks
from penstock.kernels.kv_cache.format import slot_views
from penstock.workers.gpu.pinned import put
from penstock.workers.kv_transfer.shards import BlockShape, LayerHeadRange, Shard
from penstock.workers.scheduling.sequence import Ints

PROTOCOL = 4  # version of protos/transfer.proto


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identity of this worker for its peers, with the secret that sources must present."""

    worker: str
    incarnation: str
    layout: str
    host: str
    secret: str = field(repr=False)


class KvStaging:
    """Packs rectangles of cache blocks into messages, and unpacks messages into blocks.

    Args:
        kv: This rank's cache, [layers, sides, blocks, KV heads, block_size, W] in any format
            (`kernels/kv_cache/format`). Sides are K and V; MLA has one side and one head.
        rectangle: Layers and heads of the whole model that this rank holds.
    """

    def __init__(self, kv: torch.Tensor, rectangle: LayerHeadRange) -> None:
        _, num_sides, _, _, block_size, slot = kv.shape
        self._kv = kv
        self.device = kv.device
        self.rectangle = rectangle
        self.shape = BlockShape(block_size, num_sides * block_size * slot * kv.element_size())

    def gather(
        self,
        blocks: Ints,
        shard: Shard,
        unit: int | None = None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Copy the contents of a message from `blocks`, the cache blocks that hold them.

        On a GPU, the copy is launched in the current stream.

        Args:
            unit: Positions per unit; None: the unit is a whole block.
            into: [num_bytes or more] uint8, the destination; None: allocate it.

        Returns:
            [num_bytes] uint8, the bytes of an array [layers, sides, units, heads, unit, W]. The
            array has the format of a cache whose blocks are the units; scales are included.
        """
        unit = unit or self.shape.block_size
        layers, heads = self._slices(shard.rectangle)
        indices = put(blocks, self.device)
        num_bytes = self.shape.cut(unit).num_bytes(shard)
        data = self.empty(num_bytes) if into is None else into[:num_bytes]
        staged = self._array(data, shard, unit)
        if unit == self.shape.block_size:
            gather_blocks(self._kv, indices, layers, heads, staged)
        else:
            cuts, block, within = self._cut(layers, heads, indices, shard, unit)
            for cut, view in zip(cuts, slot_views(staged), strict=True):
                view.copy_(cut[:, :, block, :, within].movedim(0, 2))
        return data

    def scatter(
        self, blocks: Ints, shard: Shard, data: torch.Tensor, unit: int | None = None
    ) -> None:
        """Copy a message's bytes `data` ([num_bytes] uint8) into `blocks`.

        On a GPU, the copy is launched in the current stream. Slots outside the message are not
        changed.
        """
        unit = unit or self.shape.block_size
        layers, heads = self._slices(shard.rectangle)
        indices = put(blocks, self.device)
        staged = self._array(data, shard, unit)
        if unit == self.shape.block_size:
            scatter_blocks(self._kv, indices, layers, heads, staged)
        else:
            cuts, block, within = self._cut(layers, heads, indices, shard, unit)
            for cut, view in zip(cuts, slot_views(staged), strict=True):
                cut[:, :, block, :, within] = view.movedim(2, 0)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Allocate a buffer for a message: [num_bytes] uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _array(self, data: torch.Tensor, shard: Shard, unit: int) -> torch.Tensor:
        """View a message's bytes as an array [layers, sides, units, heads, unit, W]."""
        rectangle = shard.rectangle
        _, num_sides, _, _, _, slot = self._kv.shape
        num_layers = rectangle.last_layer - rectangle.first_layer
        num_heads = rectangle.last_head - rectangle.first_head
        shape = (num_layers, num_sides, shard.num_blocks(unit), num_heads, unit, slot)
        return data.view(self._kv.dtype).view(shape)

    def _cut(
        self, layers: slice, heads: slice, indices: torch.Tensor, shard: Shard, unit: int
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Split the cache's blocks into units.

        Returns:
            Three items. The first has, for each of the cache's `slot_views`, a view [layers, sides,
            blocks, heads, units per block, unit, n]. The second is the block of each unit of the
            message, [units] int64. The third is the index of each unit within its block, [units]
            int64.
        """
        block_size = self.shape.block_size
        first = shard.start % block_size // unit
        units = torch.arange(first, first + shard.num_blocks(unit), device=self.device)
        per_block = block_size // unit
        views = slot_views(self._kv[layers, :, :, heads])
        cuts = [torch.unflatten(view, 4, (per_block, unit)) for view in views]
        return cuts, indices.long()[units // per_block], units % per_block

    def _slices(self, rectangle: LayerHeadRange) -> tuple[slice, slice]:
        own = self.rectangle
        layers = slice(
            rectangle.first_layer - own.first_layer, rectangle.last_layer - own.first_layer
        )
        heads = slice(rectangle.first_head - own.first_head, rectangle.last_head - own.first_head)
        return layers, heads
