"""Sorts the tokens' choices by expert, for a grouped product over all experts.

Choice `rank` of token t has the number t * k + rank. The sort is stable: each expert's choices stay
in ascending order, and the result does not depend on the order in which programs run. It is a
counting sort over chunks, with one program per chunk. The position of a choice among the choices of
its expert is the number of that expert's choices in earlier chunks, plus the number of that
expert's choices before this choice in the same chunk. The kernel that sorts also divides each
expert's choices into tiles of rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.checks import check, check_contiguous
from penstock.kernels.triton_common.launch import jit, launch, power_of_2, tl


@jit
def _count_one(
    experts, chunk, num_choices, CHUNK: tl.constexpr, STEP: tl.constexpr, E: tl.constexpr
):
    """Return the number of choices of each expert in one chunk, as a tensor [E]."""
    name = tl.arange(0, E)
    count = tl.zeros((E,), tl.int32)
    for start in range(0, CHUNK, STEP):
        choice = chunk * CHUNK + start + tl.arange(0, STEP)
        expert = tl.load(experts + choice, mask=choice < num_choices, other=-1)
        count += tl.sum((name[:, None] == expert[None, :]).to(tl.int32), axis=1)
    return count


@jit(unspecialized=("num_choices",))
def _count_kernel(
    experts,  # [num_choices] int32 expert number of each choice
    counts,  # [chunks, E] int32 result: number of choices per chunk and expert
    num_choices,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    E: tl.constexpr,  # number of experts, rounded up to a power of two
):
    """Count the choices of each expert in one chunk. The grid has one program per chunk."""
    chunk = tl.program_id(0)
    count = _count_one(experts, chunk, num_choices, CHUNK, STEP, E)
    tl.store(counts + chunk * E + tl.arange(0, E), count)


@jit(unspecialized=("num_choices", "max_tiles", "num_chunks"))
def _sort_kernel(
    experts,  # [num_choices] int32; choices with an invalid expert number are skipped
    counts,  # [chunks, E] int32 from `_count_kernel`; not read with ONE_CHUNK
    order,  # [num_choices] int32: choices sorted by expert
    tiles,  # [3, max_tiles] int32: each tile's expert, first index in `order`, number of rows
    num_tiles,  # [1] int32: number of tiles written
    num_choices,
    num_experts,
    max_tiles,
    num_chunks,
    ONE_CHUNK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    E: tl.constexpr,
):
    """Sort one chunk of choices into `order`; write the tiles whose first choice is in the chunk.

    The grid has one program per chunk.
    """
    chunk, name = tl.program_id(0), tl.arange(0, E)
    before = tl.zeros((E,), tl.int32)  # choices of each expert in earlier chunks
    total = tl.zeros((E,), tl.int32)
    if ONE_CHUNK:
        total = _count_one(experts, chunk, num_choices, CHUNK, STEP, E)
    else:
        for first in range(0, num_chunks, STEP):
            other = first + tl.arange(0, STEP)[:, None]
            count = tl.load(counts + other * E + name[None, :], mask=other < num_chunks, other=0)
            total += tl.sum(count, axis=0)
            before += tl.sum(tl.where(other < chunk, count, 0), axis=0)
    total = tl.where(name < num_experts, total, 0)
    start = tl.cumsum(total, axis=0) - total
    num_own_tiles = (total + TILE_ROWS - 1) // TILE_ROWS
    first_tile = tl.cumsum(num_own_tiles, axis=0) - num_own_tiles
    if chunk == 0:
        tl.store(num_tiles, tl.sum(num_own_tiles, axis=0))

    choice = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + choice, mask=choice < num_choices, other=-1)
    exists = (expert >= 0) & (expert < num_experts)
    rank = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, CHUNK, STEP):
        other = chunk * CHUNK + first + tl.arange(0, STEP)
        their = tl.load(experts + other, mask=other < num_choices, other=-1)
        same = (expert[:, None] == their[None, :]) & (other[None, :] < choice[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    expert = tl.where(exists, expert, 0)
    rank += tl.gather(before, expert, axis=0)
    at = tl.gather(start, expert, axis=0) + rank
    tl.store(order + at, choice, mask=exists)
    is_head = exists & (rank % TILE_ROWS == 0)
    tile = tiles + tl.gather(first_tile, expert, axis=0) + rank // TILE_ROWS
    rows = tl.minimum(tl.gather(total, expert, axis=0) - rank, TILE_ROWS)
    tl.store(tile, expert, mask=is_head)
    tl.store(tile + max_tiles, at, mask=is_head)
    tl.store(tile + 2 * max_tiles, rows, mask=is_head)


CHUNK = 256  # number of choices per program
MAX_COMPARED_PAIRS = 4096  # maximum number of choice pairs compared at a time, in registers


@dataclass(frozen=True, slots=True)
class AlignedTokens:
    """Choices sorted by expert, and the row tiles of a grouped product over them."""

    order: Tensor  # [T * k] int32: numbers of the choices (t * k + rank), sorted by expert
    tiles: Tensor  # [3, max_tiles] int32: each tile's expert, first index in `order`, row count
    num_tiles: Tensor  # [1] int32: number of valid tiles
    tile_rows: int
    top_k: int  # number of choices per token

    @property
    def max_tiles(self) -> int:
        return self.tiles.shape[1]


def align_blocks(experts: Tensor, num_experts: int, tile_rows: int) -> AlignedTokens:
    """Sort the choices `experts` [T, k] (int32, contiguous, T > 0) by expert.

    This function requires Triton.
    """
    check("experts", experts, ("T", "k"), (torch.int32,))
    check_contiguous("experts", experts)
    num_choices = experts.numel()
    # Each chosen expert has at most one tile that is partly filled.
    max_tiles = min(num_choices, num_choices // tile_rows + min(num_experts, num_choices))
    num_chunks = -(-num_choices // CHUNK)
    width = power_of_2(num_experts)
    sizes = {
        "CHUNK": CHUNK,
        "STEP": max(min(MAX_COMPARED_PAIRS // max(width, CHUNK), 32), 1),
        "E": width,
    }
    found = AlignedTokens(
        experts.new_empty(num_choices),
        experts.new_empty(3, max_tiles),
        experts.new_empty(1),
        tile_rows,
        experts.shape[1],
    )
    counts = experts.new_empty(num_chunks, width)
    if num_chunks > 1:
        launch(_count_kernel, (num_chunks,), experts, counts, num_choices, **sizes)
    launch(
        _sort_kernel,
        (num_chunks,),
        experts,
        counts,
        found.order,
        found.tiles,
        found.num_tiles,
        num_choices,
        num_experts,
        max_tiles,
        num_chunks,
        ONE_CHUNK=num_chunks == 1,
        TILE_ROWS=tile_rows,
        **sizes,
    )
    return found


def align_blocks_reference(
    experts: Tensor, num_experts: int, tile_rows: int
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Compute the result that tests expect of `align_blocks`.

    Returns:
        The order, and (expert, first index in the order, number of rows) for each tile.
    """
    chosen = experts.flatten().tolist()
    order: list[int] = []
    tiles = []
    for expert in range(num_experts):
        own = [choice for choice, name in enumerate(chosen) if name == expert]
        for start in range(0, len(own), tile_rows):
            tiles.append((expert, len(order) + start, len(own[start : start + tile_rows])))
        order += own
    return order, tiles
