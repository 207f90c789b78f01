"""Rank 0 stands for all: every part of the blocks can be had and set, wherever it lies."""

from queue import SimpleQueue

import numpy as np
import pytest
import torch

from penstock.workers.parallel.blocks import SpreadStaging, connect_blocks, move
from penstock.workers.parallel.meeting import LocalStore
from penstock.workers.parallel.mesh import Mesh, Place
from penstock.workers.parallel.plans import MoveBlocks, decode
from penstock.workers.transfer.shards import Rectangle, Shard
from penstock.workers.transfer.staging import KvStaging
from tests.support.ranks import in_threads

LAYERS, SIDES, BLOCKS, SIZE, DIM = 5, 2, 9, 2, 3
CHOSEN = np.array([7, 2, 5], np.int32)


def rectangle(place: Place, heads: int) -> Rectangle:
    layers, first = place.layers(LAYERS), heads * place.column // place.mesh.tp
    return Rectangle(layers.start, layers.stop, first, first + max(1, heads // place.mesh.tp))


def cut(whole: torch.Tensor, part: Rectangle) -> torch.Tensor:
    heads = slice(part.first_head, part.last_head)
    return whole[part.first_layer : part.last_layer, :, :, heads].clone()


def shard(part: Rectangle) -> Shard:
    return Shard(part, 0, len(CHOSEN) * SIZE)


class World:
    """Every rank's cache is its part of one; rank 0 reads parts of it, then writes all of it."""

    def __init__(self, mesh: Mesh, heads: int) -> None:
        self.mesh = mesh
        self.rectangles = [rectangle(mesh.place(rank), heads) for rank in range(mesh.num_ranks)]
        self.whole = torch.randn(LAYERS, SIDES, BLOCKS, heads, SIZE, DIM)
        self.written = torch.randn_like(self.whole)
        self.everything = Rectangle(0, LAYERS, 0, heads)
        inside = Rectangle(1, 4, 0, heads), Rectangle(2, 3, heads - 1, heads)
        self.parts = (self.everything, *inside)
        self._told = [SimpleQueue[bytes]() for _ in range(mesh.num_ranks)]

    def rank(self, rank: int, store: LocalStore) -> torch.Tensor:
        """Its part; returns its cache in the end."""
        cache = cut(self.whole, self.rectangles[rank])
        own = KvStaging(cache, self.rectangles[rank])
        line = connect_blocks(store, self.mesh.place(rank), "127.0.0.1", 20.0)
        if rank == 0:
            self._lead(own, SpreadStaging(own, self.rectangles, line, self._tell))
            self._tell(b"")
            return cache
        while message := self._told[rank].get():
            order = decode(message)
            assert isinstance(order, MoveBlocks)
            if order.rank == rank:
                move(order, own, line)
        return cache

    def _lead(self, own: KvStaging, staging: SpreadStaging) -> None:
        assert staging.rectangle == self.everything
        for part in self.parts:
            found = own.viewed(staging.gather(CHOSEN, shard(part)), CHOSEN, part)
            assert torch.equal(found, cut(self.whole, part)[:, :, CHOSEN])
        data = self.written[:, :, CHOSEN].contiguous().view(-1).view(torch.uint8)
        staging.scatter(CHOSEN, shard(self.everything), data)

    def _tell(self, message: bytes) -> None:
        for each in self._told[1:]:
            each.put(message)


@pytest.mark.parametrize(("mesh", "heads"), [(Mesh(2, 2), 4), (Mesh(4), 2), (Mesh(3), 1)])
def test_parts_are_read_and_written_where_they_are(mesh: Mesh, heads: int) -> None:
    world = World(mesh, heads)
    caches = in_threads(mesh.num_ranks, world.rank)
    after = world.whole.clone()
    after[:, :, CHOSEN] = world.written[:, :, CHOSEN]
    for own, cache in zip(world.rectangles, caches, strict=True):
        assert torch.equal(cache, cut(after, own))
