"""Tile sizes of the attention kernels, by chip and head size.

The sizes are fixed in tables, not autotuned, so that a captured CUDA graph runs the kernels that
were tested. A file with tuned sizes takes precedence (`triton_common/tuned_tiles`). The sizes were
chosen so that the kernels compile without register spills (`tests/aot/rules`). Most have three
stages, so that the copy of one tile overlaps the computation with another tile. The speed of the
kernels with these sizes has not been measured yet.
"""

from typing import NamedTuple

from penstock.kernels.triton_common.launch import DeviceInfo
from penstock.kernels.triton_common.tuned_tiles import tuned_tiles


class Tiles(NamedTuple):
    """Tile size and launch options of a kernel."""

    rows: int  # query rows per program
    columns: int  # positions per iteration; a divisor of `attention/triton_launch.SPLIT`
    num_warps: int
    num_stages: int


_CHUNKS = {
    # The inner key is the largest padded head size for which the tiles are used.
    "ample": {
        64: Tiles(128, 128, 8, 3),
        128: Tiles(128, 64, 8, 3),
        256: Tiles(128, 32, 8, 3),
    },
    "some": {
        64: Tiles(128, 64, 8, 3),
        128: Tiles(128, 32, 8, 3),
        256: Tiles(64, 16, 8, 3),
    },
    "amd": {
        64: Tiles(128, 64, 4, 1),
        128: Tiles(128, 64, 8, 1),
        256: Tiles(64, 32, 4, 1),
    },
}


def _chip_family(chip: DeviceInfo) -> str:
    """Return the family of a chip.

    The family of AMD GPUs is "amd". For NVIDIA GPUs, it depends on the size of shared memory:
    "ample" for data-center GPUs from Hopper on, "some" for the A100, "little" for graphics cards.
    """
    if not chip.is_cuda and chip.name != "interpreter":
        return "amd"
    kib = chip.shared_bytes >> 10
    return "ample" if kib > 200 else "some" if kib > 128 else "little"


def _wide_tiles(chip: DeviceInfo, rows: int, itemsize: int, is_mla: bool) -> Tiles:
    """Return the tiles for rows of more than 256 features: MLA, and head sizes up to 512.

    A tile has at most `rows` rows. The other arguments are those of `chunk_tiles`.
    """
    family = _chip_family(chip)
    if itemsize == 4:  # larger tiles would spill registers, and exceed 99 KiB of shared memory
        return Tiles(16, 16, 4 if family == "amd" else 8, 1)
    if family == "amd":
        return Tiles(min(rows, 32), 16, 8, 1)
    # With separate keys and values, tiles of 64 rows would spill registers.
    rows = min(rows, 64 if family == "ample" and is_mla else 32)
    # On sm_100, a product with 64 rows stores two more copies of the key tile. The tile therefore
    # has fewer columns.
    narrow = family == "little" or (rows == 64 and chip.name.startswith("sm_10"))
    return Tiles(rows, 16 if narrow else 32, 8, 3)


def chunk_tiles(
    chip: DeviceInfo, width: int, itemsize: int, cached: int, is_mla: bool = False
) -> Tiles:
    """Return the tiles for prefill chunks.

    Args:
        chip: the device.
        width: head size, rounded up to a power of two.
        itemsize: bytes per element of the query.
        cached: bytes per element of the cache.
        is_mla: True if keys and values are the same rows of the cache.
    """
    sizes = {"width": width, "itemsize": itemsize, "cached": cached}
    if (tuned := tuned_tiles(chip.product, "attention.chunks", **sizes)) is not None:
        return Tiles(**tuned)
    if width > 256:
        return _wide_tiles(chip, 64, itemsize, is_mla)
    if itemsize == 4:  # float32 products do not use tensor cores
        return Tiles(32, 32, 4, 1)
    family = _chip_family(chip)
    table = _CHUNKS["some" if family == "little" else family]
    tiles = table[next(widest for widest in table if width <= widest)]
    if cached > 1:
        return tiles
    # Quantized keys and values are converted in registers. Tiles with as many rows as for a float
    # cache would therefore spill registers.
    if family == "amd":
        return Tiles(32, 32 if width > 128 else 64, 4, 1)
    return tiles._replace(rows=tiles.rows // 2, columns=16 if width > 128 else tiles.columns)


def split_kv_tiles(
    chip: DeviceInfo, width: int, itemsize: int, group: int, cached: int, is_mla: bool = False
) -> Tiles:
    """Return the tiles for split KV, which is used for sequences with few query rows.

    Args:
        chip: the device.
        width: head size, rounded up to a power of two.
        itemsize: bytes per element of the query.
        group: query heads per KV head.
        cached: bytes per element of the cache.
        is_mla: True if keys and values are the same rows of the cache.
    """
    sizes = {"width": width, "group": group, "itemsize": itemsize, "cached": cached}
    if (tuned := tuned_tiles(chip.product, "attention.split_kv", **sizes)) is not None:
        return Tiles(**tuned)
    rows = min(64, max(16, 1 << (group - 1).bit_length()))
    if width > 256:  # tiles with more rows would spill registers on sm_90 and gfx942
        most = 16 if _chip_family(chip) == "amd" else 32
        return _wide_tiles(chip, min(rows, most), itemsize, is_mla)
    if itemsize == 4:
        return Tiles(min(rows, 32), 32, 4, 1)
    # On graphics cards, tiles are half as large, so that two programs share a multiprocessor.
    columns = 32 if _chip_family(chip) == "little" and width > 64 else 64
    if width > 128:
        columns //= 2
    # With 8-bit codes, a tile of the same number of bytes has twice as many columns.
    if cached == 1 and width <= 128:
        columns *= 2
    return Tiles(rows, columns, 4, 3)


def batch_invariant_tiles(
    chip: DeviceInfo, width: int, itemsize: int, cached: int, is_mla: bool = False
) -> Tiles:
    """Return the tiles for batch-invariant attention, for chunks as well as for single tokens.

    These tiles are smaller than other tiles, because a program needs registers for two
    accumulators: one for the current partition and one for all partitions. The arguments are those
    of `chunk_tiles`.
    """
    if width > 256:
        return _wide_tiles(chip, 16, itemsize, is_mla)
    if itemsize == 4:
        return Tiles(32, 32, 4, 1)
    family = _chip_family(chip)
    if family == "amd":
        warps = 4 if cached == 1 or width <= 128 else 8
        return Tiles(32, 32 if width > 128 else 64, warps, 2)
    columns = 32 if (family == "little" or cached == 1) and width > 64 else 64
    return Tiles(32, columns, 8 if width > 128 else 4, 3)
