"""Writing keys and values into paged blocks, and moving blocks out and in.

One layer's cache is [2, N, H, S, D]: keys and values, N blocks, H KV heads, S slots a block, D
features. Of latent attention it is [1, N, 1, S, D]: one row a token (see `latent_attention`). A
slot number is block * S + offset. The whole cache has the layers in front: [L, 2, N, H, S, D].
"""

import torch
from torch import Tensor


def write_rows(slots: Tensor, layer_shape: torch.Size) -> Tensor:
    """Where each new head goes in the cache seen as rows of D features; once a step.

    slots: [T] int64; layer_shape: [2, N, H, S, D]. The result: [T, 2 H] int64, key heads first.
    """
    num_sides, num_blocks, num_heads, block_size, _ = layer_shape
    heads = torch.arange(num_heads, device=slots.device) * block_size
    sides = torch.arange(num_sides, device=slots.device) * (num_blocks * num_heads * block_size)
    starts = slots // block_size * (num_heads * block_size) + slots % block_size
    return (starts[:, None, None] + sides[:, None] + heads).flatten(1)


def write_kv(layer: Tensor, rows: Tensor, new: Tensor) -> None:
    """Puts new keys and values in their slots, in place.

    layer: [2, N, H, S, D] contiguous; rows: of `write_rows`; new: [T, 2 H, D], key heads first
    (the tail of a fused qkv product as it is). Slots are distinct.
    """
    layer.view(-1, layer.shape[-1]).index_put_((rows,), new)


def write_kv_reference(layer: Tensor, slots: Tensor, new: Tensor) -> None:
    """What `write_kv` means, slot by slot; slots: [T]."""
    num_sides, _, num_heads, block_size, _ = layer.shape
    for slot, heads in zip(slots.tolist(), new, strict=True):
        sides = heads.view(num_sides, num_heads, -1)
        layer[:, slot // block_size, :, slot % block_size] = sides


def gather_blocks(kv: Tensor, blocks: Tensor, layers: slice, heads: slice) -> Tensor:
    """Copies a rectangle of layers and heads of some blocks out of the cache, to be sent.

    kv: [L, 2, N, H, S, D]; blocks: [n] integers on its device. The result is contiguous:
    [layers, 2, n, heads, S, D].
    """
    return kv[layers, :, :, heads].index_select(2, blocks)


def copy_blocks(kv: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies whole blocks, all at once: what is overwritten is read before.

    kv: [L, 2, N, H, S, D]; sources, targets: [n] int64 on its device, no target twice.
    """
    kv.index_copy_(2, targets, kv.index_select(2, sources))


def scatter_blocks(kv: Tensor, blocks: Tensor, layers: slice, heads: slice, staged: Tensor) -> None:
    """Copies what `gather_blocks` gave into the same rectangle of other blocks, in place."""
    kv[layers, :, :, heads].index_copy_(2, blocks.to(torch.int64), staged)
