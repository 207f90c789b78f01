"""Tiles of the attention kernels, by chip and head size: tables, so that nothing is tuned at run
time and a captured graph holds what was tested.

Chosen by what compiles ahead of time without a spilled register, not yet by a clock.
"""

from typing import NamedTuple

from penstock.kernels.triton_common.launch import DeviceInfo


class Tiles(NamedTuple):
    rows: int
    columns: int  # positions at a time; divides `attention/triton_launch.SPLIT`
    num_warps: int
    num_stages: int


_CHUNKS = {
    # widest head: tiles
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
    """By shared memory: of Hopper and later, of the A100, of chips for graphics."""
    if not chip.is_cuda and chip.name != "interpreter":
        return "amd"
    kib = chip.shared_bytes >> 10
    return "ample" if kib > 200 else "some" if kib > 128 else "little"


def chunk_tiles(chip: DeviceInfo, width: int, itemsize: int) -> Tiles:
    """Of whole chunks; width: features of a tile, itemsize: of the query."""
    if itemsize == 4:  # on no tensor core
        return Tiles(32, 32, 4, 1)
    table = _CHUNKS[_chip_family(chip)]
    return table[next(widest for widest in table if width <= widest)]


def split_kv_tiles(chip: DeviceInfo, width: int, itemsize: int, group: int, cached: int) -> Tiles:
    """Of sequences with few rows; group: query heads a KV head; cached: itemsize of the cache."""
    rows = min(64, max(16, 1 << (group - 1).bit_length()))
    if itemsize == 4:
        return Tiles(min(rows, 32), 32, 4, 1)
    if width > 256:  # rows of latent attention
        widest = chunk_tiles(chip, width, itemsize)
        return widest._replace(rows=min(rows, widest.rows))
    if width > 128:
        return Tiles(rows, 32, 4, 2)
    if cached == 1:  # as many bytes a tile as of 16 bits
        return Tiles(rows, 128, 4, 2)
    return Tiles(rows, 64, 4, 2 if _chip_family(chip) == "little" else 3)


def batch_invariant_tiles(chip: DeviceInfo, width: int, itemsize: int) -> Tiles:
    """Of chunks and single tokens alike, so that both have the same arithmetic; with room for the
    sums of a part beside those of all parts."""
    if itemsize == 4:
        return chunk_tiles(chip, width, itemsize)
    if width > 256:  # rows of latent attention
        return chunk_tiles(chip, width, itemsize)._replace(rows=16)
    if width > 128:
        return Tiles(32, 32 if _chip_family(chip) == "amd" else 64, 8, 2)
    return Tiles(32, 64, 4, 2)
