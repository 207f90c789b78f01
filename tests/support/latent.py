"""Compare MLA kernels, through their launcher, with the reference in float64."""

from types import ModuleType
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.mla import op as sound
from penstock.kernels.mla.op import mla_attention_reference
from tests.support.attention import alike, compare, small_tiles, within_bounds
from tests.support.batches import Batch, make_batch, poison
from tests.support.devices import DEVICE, exact_products

Sizes = tuple[int, int, int, int, int]  # (num_heads, query_dim, rope_dim, value_dim, latent rank)

SMALL: Sizes = (3, 5, 4, 7, 11)


def make_case(
    lengths: list[tuple[int, int]], sizes: Sizes = SMALL, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Batch]:
    """Return query, KV layer, up-projection and batch, with random contents."""
    num_heads, query_dim, rope_dim, value_dim, rank = sizes
    batch, num_blocks = make_batch(lengths, 16, seed=len(lengths))
    batch = within_bounds(batch, num_blocks)
    torch.manual_seed(sum(sizes))
    layer = torch.randn(1, num_blocks, 1, 16, rank + rope_dim)
    poison(layer, batch)
    query = torch.randn(int(batch[0][-1]), num_heads, query_dim + rope_dim)
    up = torch.randn(num_heads, query_dim + value_dim, rank) * rank**-0.5
    return query.to(DEVICE, dtype), layer.to(DEVICE, dtype), up.to(DEVICE, dtype), batch


def check_exact(query: Tensor, layer: Tensor, up: Tensor, batch: Batch, found: Tensor) -> None:
    query, layer, up = (tensor.cpu().double() for tensor in (query, layer, up))
    compare(found, mla_attention_reference(query, layer, up, *batch, 0.3))


def attend(
    query: Tensor,
    layer: Tensor,
    up: Tensor,
    batch: Batch,
    one_path: bool = False,
    file: ModuleType = sound,
) -> Tensor:
    """Compute MLA attention with the functions of `file`: `mla.op` or a mutant of it."""
    plan = file.plan_mla(*batch, layer, up.shape[2], up.shape[1], one_path)
    found: Tensor = file.mla_attention(query, layer, up, plan, 0.3)
    return found


def check(
    lengths: list[tuple[int, int]],
    sizes: Sizes = SMALL,
    dtype: torch.dtype = torch.float32,
    absorbs: bool = True,
    file: ModuleType = sound,
) -> None:
    """Check MLA attention against the reference.

    Args:
        absorbs: prefill chunks use the absorbed form (True) or are expanded first (False).
    """
    case = make_case(lengths, sizes, dtype)
    with small_tiles(), mock.patch.object(file, "_absorbed_is_cheaper", return_value=absorbs):
        check_exact(*case, attend(*case, file=file))


def check_one_path(lengths: list[tuple[int, int]], pieces: list[tuple[int, int]]) -> None:
    """Check MLA with `one_path=True` against the reference, and pieces against the whole.

    `pieces` are (first token, length) of parts of the first sequence. Each piece is also computed
    alone. The result must be bitwise identical to that part of the whole result.
    """
    query, layer, up, batch = make_case(lengths)
    _, contexts, tables = batch
    with small_tiles(), exact_products():
        whole = attend(query, layer, up, batch, one_path=True)
        check_exact(query, layer, up, batch, whole)
        for begin, length in pieces:
            context = np.array([contexts[0] - lengths[0][0] + begin + length], np.int32)
            piece = (np.array([0, length], np.int32), context, tables[:1])
            tokens = slice(begin, begin + length)
            alike(attend(query[tokens], layer, up, piece, one_path=True), whole[tokens])
