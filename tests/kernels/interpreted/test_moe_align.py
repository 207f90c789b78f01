"""The Triton kernels that sort the tokens' choices by expert."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.moe.triton_align import CHUNK, align_blocks, align_blocks_reference
from tests.support.poison import poisoned_memory


def check(device: torch.device, experts: torch.Tensor, num_experts: int, tile_rows: int) -> None:
    with poisoned_memory():
        found = align_blocks(experts.to(device, torch.int32), num_experts, tile_rows)
    order, tiles = align_blocks_reference(experts, num_experts, tile_rows)
    assert found.order[: len(order)].tolist() == order
    assert int(found.num_tiles) == len(tiles) <= found.tiles.shape[1]
    assert [tuple(tile) for tile in found.tiles[:, : len(tiles)].T.tolist()] == tiles


@settings(max_examples=10, derandomize=True)
@given(
    num_tokens=st.integers(1, 60),
    top_k=st.integers(1, 4),
    num_experts=st.integers(1, 9),
    tile_rows=st.sampled_from([16, 64]),
    seed=st.integers(0, 100),
)
def test_matches_the_reference(
    device: torch.device, num_tokens: int, top_k: int, num_experts: int, tile_rows: int, seed: int
) -> None:
    torch.manual_seed(seed)
    check(device, torch.randint(0, num_experts, (num_tokens, top_k)), num_experts, tile_rows)


def test_several_chunks(device: torch.device) -> None:
    torch.manual_seed(0)
    check(device, torch.randint(0, 130, (2 * CHUNK + 5, 1)), 130, 16)


def test_all_tokens_to_one_expert(device: torch.device) -> None:
    check(device, torch.full((CHUNK + 9, 1), 6), 7, 64)


def test_choices_of_unknown_experts_are_left_out(device: torch.device) -> None:
    experts = torch.tensor([[0, 3], [-1, 2], [2, 99]])
    order, tiles = align_blocks_reference(experts, 3, 16)
    assert order == [0, 3, 4]
    check(device, experts, 3, 16)
    assert len(tiles) == 2
