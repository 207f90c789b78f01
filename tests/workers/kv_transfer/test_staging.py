"""Gather and scatter copy every position to its block, and change no other slot."""

from math import gcd

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels.kv_cache.format import FORMATS, dequantize, to_cache
from penstock.workers.kv_transfer.shards import LayerHeadRange, blocks_of, split
from penstock.workers.kv_transfer.staging import KvStaging

LAYERS, DIM = 3, 2
WHOLE = LayerHeadRange(0, LAYERS, 0, 2)
LATENT = LayerHeadRange(0, LAYERS, 0, 1)


class Side:
    """A KV cache that holds a sequence of `length` positions in scattered blocks.

    `name` is the cache's format. With None, the elements are arbitrary.
    """

    def __init__(
        self,
        whole: LayerHeadRange,
        size: int,
        length: int,
        rng: np.random.Generator,
        name: str | None,
    ) -> None:
        num, heads = -(-length // size), whole.last_head
        num_sides = 1 if whole == LATENT else 2
        shape = (LAYERS, num_sides, num + 3, heads, size, DIM)
        self.size = size
        if name is None:
            self.kv = torch.from_numpy(rng.integers(0, 1 << 40, shape))
        else:
            self.kv = to_cache(torch.from_numpy(rng.normal(size=shape)), FORMATS[name])
        self.staging = KvStaging(self.kv, whole)
        self.blocks = rng.permutation(num + 3)[:num].astype(np.int32)

    def features(self) -> torch.Tensor:
        """Return all features [layers, sides, blocks, heads, size, DIM]."""
        return self.kv if self.kv.dtype == torch.int64 else dequantize(self.kv)

    def sequence(self) -> torch.Tensor:
        """Return the sequence's KV [layers, sides, heads, positions, features]."""
        kv = self.features()[:, :, torch.from_numpy(self.blocks).long()].movedim(2, 3)
        return kv.flatten(3, 4)

    def replaced(self, positions: torch.Tensor) -> torch.Tensor:
        """Return `features` in which the sequence's KV is replaced by `positions`."""
        changed = self.features().clone()
        cut = torch.unflatten(positions, 3, (-1, self.size)).movedim(3, 2)
        changed[:, :, torch.from_numpy(self.blocks).long()] = cut
        return changed


Move = tuple[LayerHeadRange, int, int, int, int, int, int, str | None]


@st.composite
def moves(draw: st.DrawFn) -> Move:
    whole = draw(st.sampled_from([WHOLE, LATENT]))
    source_size, target_size = (draw(st.sampled_from([1, 2, 3, 4, 6, 16, 32])) for _ in range(2))
    start = target_size * draw(st.integers(0, 3))
    stop = start + draw(st.integers(1, 70))
    message_bytes, seed = draw(st.integers(1, 4000)), draw(st.integers(0, 99))
    name = draw(st.sampled_from([None, "fp8", "int8"]))
    return whole, source_size, target_size, start, stop, message_bytes, seed, name


@given(moves())
def test_all_positions_arrive_for_all_block_sizes(move: Move) -> None:
    whole, source_size, target_size, start, stop, message_bytes, seed, name = move
    rng = np.random.default_rng(seed)
    source, target = (Side(whole, size, stop, rng, name) for size in (source_size, target_size))
    unit = gcd(source_size, target_size)
    shape = source.staging.shape.cut(unit)
    assert shape == target.staging.shape.cut(unit)
    end = -(-stop // unit) * unit  # the last unit is transferred as a whole
    expected = target.sequence()
    expected[:, :, :, start:end] = source.sequence()[:, :, :, start:end]
    after = target.replaced(expected)
    # The target's blocks, from the block of position `start` on.
    own = target.blocks[start // target_size :]
    pinned = source.blocks[start // source_size :]
    for shard in split(whole, start, stop, shape, message_bytes):
        data = source.staging.gather(blocks_of(shard, pinned, start, source_size), shard, unit)
        assert data.dtype == torch.uint8
        assert len(data) == shape.num_bytes(shard)
        target.staging.scatter(blocks_of(shard, own, start, target_size), shard, data, unit)
    assert torch.equal(target.features(), after)
