"""Tile sizes of the attention kernels, by chip and head size.

They are fixed tables rather than autotuned, so a captured CUDA graph runs the kernels that were
tested. They were chosen to compile ahead of time without register spills, not yet by measuring.
"""

from typing import NamedTuple

from penstock.kernels.triton_common.launch import DeviceInfo


class Tiles(NamedTuple):
    """Tile size and launch options of a kernel."""

    rows: int  # query rows per program
    columns: int  # positions per iteration; divides `attention/triton_launch.SPLIT`
    num_warps: int
    num_stages: int


_CHUNKS = {
    # largest padded head size: tiles
    "ample": {
        64: Tiles(128, 128, 8, 2),
        128: Tiles(128, 64, 8, 2),
        256: Tiles(128, 32, 8, 2),
        1024: Tiles(64, 32, 8, 2),
    },
    "some": {
        64: Tiles(128, 64, 8, 3),
        128: Tiles(128, 32, 8, 3),
        256: Tiles(64, 32, 8, 2),
        1024: Tiles(32, 32, 8, 2),
    },
    "little": {
        64: Tiles(128, 64, 8, 2),
        128: Tiles(64, 32, 4, 3),
        256: Tiles(64, 32, 8, 2),
        1024: Tiles(32, 32, 8, 2),
    },
    "amd": {
        64: Tiles(128, 64, 4, 1),
        128: Tiles(128, 64, 8, 1),
        256: Tiles(64, 32, 4, 1),
        1024: Tiles(32, 16, 8, 1),
    },
}


def _chip_family(chip: DeviceInfo) -> str:
    """Classify by shared memory: Hopper or later, A100, or graphics cards; "amd" for AMD GPUs."""
    if not chip.is_cuda and chip.name != "interpreter":
        return "amd"
    kib = chip.shared_bytes >> 10
    return "ample" if kib > 200 else "some" if kib > 128 else "little"


def chunk_tiles(chip: DeviceInfo, width: int, itemsize: int) -> Tiles:
    """Return the tiles for prefill chunks, for the padded head size and the query's itemsize."""
    if itemsize == 4:  # float32 does not use tensor cores
        return Tiles(32, 32, 4, 1)
    table = _CHUNKS[_chip_family(chip)]
    return table[next(widest for widest in table if width <= widest)]


def split_kv_tiles(chip: DeviceInfo, width: int, itemsize: int, group: int, cached: int) -> Tiles:
    """Return the tiles for sequences with few query rows, whose positions are split.

    Args:
        chip: the device.
        width: padded head size.
        itemsize: bytes per element of the query.
        group: query heads per KV head.
        cached: bytes per element of the cache.
    """
    rows = min(64, max(16, 1 << (group - 1).bit_length()))
    if itemsize == 4:
        return Tiles(min(rows, 32), 32, 4, 1)
    if width > 256:  # rows of MLA
        widest = chunk_tiles(chip, width, itemsize)
        return widest._replace(rows=min(rows, widest.rows))
    if width > 128:
        return Tiles(rows, 32, 4, 2)
    if cached == 1:  # twice the columns: as many bytes per tile as with 16 bits
        return Tiles(rows, 128, 4, 2)
    return Tiles(rows, 64, 4, 2 if _chip_family(chip) == "little" else 3)


def batch_invariant_tiles(chip: DeviceInfo, width: int, itemsize: int) -> Tiles:
    """Return the tiles that chunks and single tokens share, so that both have the same arithmetic.

    They are smaller because a program holds two accumulators: of one partition and of all.
    """
    if itemsize == 4:
        return chunk_tiles(chip, width, itemsize)
    if width > 256:  # rows of MLA
        return chunk_tiles(chip, width, itemsize)._replace(rows=16)
    if width > 128:
        return Tiles(32, 32 if _chip_family(chip) == "amd" else 64, 8, 2)
    return Tiles(32, 64, 4, 2)
