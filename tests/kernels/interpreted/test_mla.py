"""Compares MLA on the Triton kernels of paged attention with a float64 reference."""

import numpy as np
import pytest
import torch

from penstock.kernels.attention.triton_plan import TiledPlanner
from penstock.kernels.mla.op import mla_attention, plan_mla_on_device
from tests.support.attention import small_tiles
from tests.support.devices import DEVICE, exact_products
from tests.support.latent import (
    SMALL,
    Sizes,
    attend,
    check,
    check_exact,
    check_one_path,
    make_case,
)

pytestmark = pytest.mark.interpreted

RAGGED = [(1, 1), (1, 33), (0, 5), (7, 7), (1, 64), (12, 50), (2, 65)]


@pytest.mark.parametrize("absorbs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", [SMALL, (20, 8, 16, 8, 32)])
def test_a_ragged_batch(sizes: Sizes, dtype: torch.dtype, absorbs: bool) -> None:
    check(RAGGED, sizes, dtype, absorbs)


def test_default_tile_sizes() -> None:
    case = make_case([(1, 514), (1, 40)], (16, 64, 32, 64, 256), torch.float16)
    check_exact(*case, attend(*case))


@pytest.mark.parametrize("lengths", [RAGGED, [(1, 33), (1, 65)]])
def test_a_plan_of_device_tensors(lengths: list[tuple[int, int]]) -> None:
    query, layer, up, batch = make_case(lengths)
    starts, contexts, tables = (torch.from_numpy(array).to(DEVICE) for array in batch)
    planner = TiledPlanner()
    with small_tiles():
        planner.prepare(batch[0], batch[1], is_captured=lengths is not RAGGED)
        plan = plan_mla_on_device(starts, contexts, tables, layer, 11, planner, 80)
        found = mla_attention(query, layer, up, plan, 0.3)
    check_exact(query, layer, up, batch, found)


def test_one_path_bits_of_a_sequence_do_not_depend_on_the_batch() -> None:
    query, layer, up, batch = make_case(RAGGED)
    starts, contexts, tables = batch
    with small_tiles(), exact_products():
        batched = attend(query, layer, up, batch, one_path=True)
        for b in (1, 4, 6):
            tokens = slice(starts[b], starts[b + 1])
            length = np.array([0, starts[b + 1] - starts[b]], np.int32)
            single = (length, contexts[b : b + 1], tables[b : b + 1])
            alone = attend(query[tokens], layer, up, single, one_path=True)
            assert torch.equal(alone, batched[tokens])


def test_one_path_bits_do_not_depend_on_chunking() -> None:
    check_one_path([(40, 90), (1, 70), (9, 9)], [(0, 1), (3, 30), (39, 1)])


def test_a_block_outside_the_cache_is_refused() -> None:
    query, layer, up, (starts, contexts, tables) = make_case([(1, 40)])
    tables[0, 1] = layer.shape[1]
    with pytest.raises(
        ValueError, match=r"block_tables\[0, 1\] is 5: expected a block number from 0 to 4"
    ):
        attend(query, layer, up, (starts, contexts, tables))
