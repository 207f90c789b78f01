"""Latent attention in the kernels of paged attention, through the very launcher."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels import latent_attention as file
from penstock.kernels.latent_attention import (
    device_latent_plan,
    latent_attention,
    latent_attention_reference,
    plan_latent_attention,
)
from tests.support.attention import as_if_on_a_device, compare, small_tiles, within_bounds
from tests.support.batches import Batch, make_batch, poison
from tests.support.devices import DEVICE, exact_products

pytestmark = pytest.mark.interpreted

Sizes = tuple[int, int, int, int, int]  # H, Q, P, V, R

RAGGED = [(1, 1), (1, 33), (0, 5), (7, 7), (1, 64), (12, 50), (2, 65)]


def make_case(
    lengths: list[tuple[int, int]], sizes: Sizes, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Batch]:
    num_heads, query_dim, rope_dim, value_dim, rank = sizes
    batch, num_blocks = make_batch(lengths, 16, seed=len(lengths))
    batch = within_bounds(batch, num_blocks)
    torch.manual_seed(sum(sizes))
    layer = torch.randn(1, num_blocks, 1, 16, rank + rope_dim)
    poison(layer, batch)
    query = torch.randn(int(batch[0][-1]), num_heads, query_dim + rope_dim)
    up = torch.randn(num_heads, query_dim + value_dim, rank) * rank**-0.5
    return query.to(DEVICE, dtype), layer.to(DEVICE, dtype), up.to(DEVICE, dtype), batch


def check(query: Tensor, layer: Tensor, up: Tensor, batch: Batch, found: Tensor) -> None:
    query, layer, up = (tensor.cpu().double() for tensor in (query, layer, up))
    compare(found, latent_attention_reference(query, layer, up, *batch, 0.3))


def attend(query: Tensor, layer: Tensor, up: Tensor, batch: Batch) -> Tensor:
    plan = plan_latent_attention(*batch, layer, up.shape[2], up.shape[1])
    return latent_attention(query, layer, up, plan, 0.3)


@pytest.mark.parametrize("absorbs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", [(3, 5, 4, 7, 11), (20, 8, 16, 8, 32)])
def test_a_ragged_batch(sizes: Sizes, dtype: torch.dtype, absorbs: bool) -> None:
    """Chunks absorbed in the kernel, or expanded beside it."""
    case = make_case(RAGGED, sizes, dtype)
    with small_tiles(), mock.patch.object(file, "_absorbed_is_less", return_value=absorbs):
        check(*case, attend(*case))


def test_the_real_tiles() -> None:
    case = make_case([(1, 514), (1, 40)], (16, 64, 32, 64, 256), torch.float16)
    check(*case, attend(*case))


def test_a_plan_of_device_tensors() -> None:
    query, layer, up, batch = make_case(RAGGED, (3, 5, 4, 7, 11))
    starts, contexts, tables = (torch.from_numpy(array).to(DEVICE) for array in batch)
    with small_tiles(), as_if_on_a_device():
        plan = device_latent_plan(starts, contexts, tables, layer, 11, 12, 80)
        found = latent_attention(query, layer, up, plan, 0.3)
    check(query, layer, up, batch, found)


def test_a_sequence_is_the_same_alone_and_in_a_crowd() -> None:
    query, layer, up, batch = make_case(RAGGED, (3, 5, 4, 7, 11))
    starts, contexts, tables = batch
    sums = torch.bmm  # the products of a library are not held to this

    def one_by_one(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([sums(row[:, None], y)[:, 0] for row in x.unbind(1)], 1)

    absorbed = mock.patch.object(file, "_absorbed_is_less", return_value=True)
    with small_tiles(), absorbed, mock.patch.object(torch, "bmm", one_by_one):
        crowd = attend(query, layer, up, batch)
        for b in (1, 4, 6):
            tokens = slice(starts[b], starts[b + 1])
            length = np.array([0, starts[b + 1] - starts[b]], np.int32)
            alone = (length, contexts[b : b + 1], tables[b : b + 1])
            assert torch.equal(attend(query[tokens], layer, up, alone), crowd[tokens])


def test_on_one_path_a_token_is_the_same_however_its_prompt_is_cut() -> None:
    query, layer, up, batch = make_case([(40, 90), (1, 70), (9, 9)], (3, 5, 4, 7, 11))
    _, contexts, tables = batch

    def on_one_path(query: Tensor, batch: Batch) -> Tensor:
        plan = plan_latent_attention(*batch, layer, up.shape[2], up.shape[1], one_path=True)
        return latent_attention(query, layer, up, plan, 0.3)

    with small_tiles(), exact_products():
        whole = on_one_path(query, batch)
        check(query, layer, up, batch, whole)
        for begin, length in ((0, 1), (3, 30), (39, 1)):
            context = np.array([contexts[0] - 40 + begin + length], np.int32)
            piece = (np.array([0, length], np.int32), context, tables[:1])
            tokens = slice(begin, begin + length)
            assert torch.equal(on_one_path(query[tokens], piece), whole[tokens])


def test_a_block_that_is_not_there_is_refused() -> None:
    query, layer, up, (starts, contexts, tables) = make_case([(1, 40)], (3, 5, 4, 7, 11))
    tables[0, 1] = layer.shape[1]
    with pytest.raises(
        ValueError, match=r"block_tables: blocks below 5 expected, not 5 at \[0, 1\]"
    ):
        attend(query, layer, up, (starts, contexts, tables))
