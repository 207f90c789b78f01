"""Reads safetensors files: validates the header and streams the data into tensors.

A file consists of 8 bytes (the length of the header, little endian), the header (a JSON object from
name to dtype, shape and byte range) and the data. The README of the `safetensors` project describes
the format.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from penstock.workers.models.config import BadCheckpoint
from penstock.workers.weights.regions import Region
from penstock.workers.weights.tensor_entry import TensorEntry

MAX_HEADER_BYTES = 16 << 20
MAX_DIMENSIONS = 8
# Maximum number of items of one tensor; bounds the time of arithmetic on numbers from the header.
MAX_ITEMS = 1 << 48
CHUNK_BYTES = 8 << 20

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights that are not quantized."""

STORED_DTYPES = DTYPES | {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""All dtypes that can be loaded."""

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}


@dataclass(frozen=True, slots=True)
class SafetensorsEntry(TensorEntry):
    """A tensor in a safetensors file; `load` reads the items of a region in file order."""

    def loadable_dtypes(self, accepted: tuple[str, ...]) -> tuple[str, ...]:
        return accepted

    def bytes_of(self, num_items: int) -> int:
        return num_items * STORED_DTYPES[self.dtype].itemsize

    def load(
        self,
        target: Tensor,
        file: BufferedReader,
        progress: Callable[[int], None],
        region: Region = (),
    ) -> None:
        load_tensor(self, target, file, progress, region)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return a file's tensors by name; raise `BadCheckpoint` for an invalid or incomplete file."""
    try:
        with path.open("rb") as file:
            return _read_header(path, file, path.stat().st_size)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is missing: copy or download it again") from None
    except OSError as error:
        raise BadCheckpoint(
            f"{path} cannot be read ({error.strerror}): check the file and its permissions"
        ) from None


def _read_header(path: Path, file: BufferedReader, file_bytes: int) -> dict[str, TensorEntry]:
    length = int.from_bytes(file.read(8), "little")
    if file_bytes < 8 or length > MAX_HEADER_BYTES:
        raise _broken(
            path, f"it does not begin with a header length (8 bytes) of at most {MAX_HEADER_BYTES}"
        )
    if 8 + length > file_bytes:
        raise _broken(path, f"it ends inside its header, at {file_bytes} bytes")
    try:
        header = json.loads(file.read(length), object_pairs_hook=_distinct)
    except _RepeatedName as error:
        raise _broken(path, f"its header contains the name {str(error)!r:.80} twice") from None
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header cannot be parsed as JSON ({error})") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, fields, 8 + length) for name, fields in header.items()}
    _check_ranges(path, sorted(entries.values(), key=lambda entry: entry.start), file_bytes)
    return entries


class _RepeatedName(Exception):
    """Raised with a name that an object of the header contains twice."""


def _broken(path: Path, what: str) -> BadCheckpoint:
    return BadCheckpoint(f"{path} is corrupt or incomplete: {what}. Copy or download it again")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _RepeatedName(name)
        found[name] = value
    return found


def _entry(path: Path, name: str, fields: object, data_start: int) -> TensorEntry:
    if not isinstance(fields, dict):
        raise _broken(path, f"the entry of tensor {name} is {fields!r:.80}: expected an object")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _broken(path, f"tensor {name} has the unknown dtype {dtype!r:.80}")
    if (
        not _counts(shape)
        or len(shape) > MAX_DIMENSIONS
        or not _counts(offsets)
        or len(offsets) != 2
    ):
        raise _broken(
            path,
            f"tensor {name} has the shape {shape!r:.80} and the byte range {offsets!r:.80}: "
            f"expected a shape of at most {MAX_DIMENSIONS} whole numbers below {MAX_ITEMS}, and a "
            "byte range of two such numbers",
        )
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        size = math.prod(shape) * ITEM_BYTES[dtype]
        raise _broken(
            path, f"tensor {name} has {end - begin} bytes, but its shape and dtype need {size}"
        )
    return SafetensorsEntry(path, name, dtype, tuple(shape), data_start + begin, end - begin)


def _counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < MAX_ITEMS for item in value
    )


def _check_ranges(path: Path, entries: list[TensorEntry], file_bytes: int) -> None:
    end = 0
    for entry in entries:
        if entry.start < end:
            raise _broken(path, f"the bytes of tensor {entry.name} overlap those of another tensor")
        end = entry.start + entry.num_bytes
    if end > file_bytes:
        raise _broken(path, f"it has {file_bytes} bytes, but its tensors end at byte {end}")


def load_tensor(
    entry: TensorEntry,
    target: Tensor,
    file: BufferedReader,
    progress: Callable[[int], None],
    region: Region = (),
) -> None:
    """Stream a tensor, or only a region of it, into `target`.

    Args:
        target: Contiguous tensor with the shape of the region. Its dtype may differ from the dtype
            in the file if both are floating-point dtypes; `copy_` then converts.
        file: Open file that contains the tensor.
        progress: Called after each chunk with the number of bytes of the chunk.
    """
    dtype = STORED_DTYPES[entry.dtype]
    flat = target.view(-1)
    buffer = bytearray(min(CHUNK_BYTES, len(flat) * dtype.itemsize))
    num_filled = first = 0
    for start, size in _runs(entry.shape, region):
        file.seek(entry.start + start * dtype.itemsize)
        left = size * dtype.itemsize
        while left:
            piece = memoryview(buffer)[num_filled : num_filled + left]
            if file.readinto(piece) != len(piece):
                raise _broken(entry.path, f"it ends inside tensor {entry.name}")
            left -= len(piece)
            num_filled += len(piece)
            last = first + num_filled // dtype.itemsize
            if num_filled == len(buffer) or last == len(flat):
                flat[first:last].copy_(torch.frombuffer(buffer, dtype=dtype, count=last - first))
                progress(num_filled)
                num_filled, first = 0, last


def _runs(shape: tuple[int, ...], region: Region) -> Iterator[tuple[int, int]]:
    """Yield each contiguous run of a region in the file: (index of its first item, item count)."""
    cut = max((at for at, ranges in enumerate(region) if ranges is not None), default=-1)
    if cut < 0:
        yield 0, math.prod(shape)
        return
    axis_ranges = [
        [(0, shape[at])] if ranges is None else ranges for at, ranges in enumerate(region)
    ]
    inner = math.prod(shape[cut + 1 :])
    rows = [
        itertools.chain(*(range(first, last) for first, last in spans))
        for spans in axis_ranges[:cut]
    ]
    for index in itertools.product(*rows):
        row = 0
        for size, at in zip(shape, index, strict=False):
            row = row * size + at
        for first, last in axis_ranges[cut]:
            yield (row * shape[cut] + first) * inner, (last - first) * inner
