"""Reads the header of a GGUF file, which has the metadata and the location of each tensor.

A file starts with the magic `GGUF`, the version, the number of tensors and the number of metadata
entries. The metadata (key, type, value) follows, then the entries of the tensors (name, dimensions,
type, offset), and then the aligned data. Numbers are little endian. `docs/gguf.md` of ggml
describes the format.

Files are not trusted. Every count, length, type, dimension and offset is compared with the size of
the file before it is used. `MAX_HEADER_BYTES` limits the time and the memory that reading a file
can take.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from penstock.common.checkpoint_errors import BadCheckpoint, UnsupportedModel
from penstock.common.gguf.tensor_types import OTHER_TYPES, TENSOR_TYPES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 << 20
MAX_NAME_BYTES = 255  # limit of the length of a metadata key or a tensor name
MAX_DIMENSIONS = 4
MAX_ITEMS = 1 << 44  # limit of the number of items of one tensor
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {
    code: struct.Struct("<" + letter)
    for code, letter in {
        **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"},
        _BOOL: "B",
    }.items()
}
_UINT32, _UINT64 = _NUMBERS[4], _NUMBERS[10]
# Smallest size of a metadata entry: the length of its key, the key, the type and the value. The key
# and the value have at least one byte each.
_LEAST_ENTRY_BYTES = _UINT64.size + 1 + _UINT32.size + 1
_LEAST_TENSOR_BYTES = 2 * _UINT64.size + 1 + 2 * _UINT32.size + _UINT64.size


class GgufArray:
    """An array in the metadata, whose items are decoded only when they are read.

    The bounds of the array have been checked against the file. Its strings may still be invalid
    UTF-8.
    """

    def __init__(self, cursor: "_Cursor", key: str, code: int, count: int) -> None:
        self._data, self._path = cursor.data, cursor.path
        self._start, self._key, self._code, self._count = cursor.position, key, code, count

    def __len__(self) -> int:
        return self._count

    def numbers(self) -> list[int | float]:
        """Return the items of an array of numbers. Raise `BadCheckpoint` if they are strings."""
        if self._code == _STRING:
            raise self._wrong("contains strings: expected numbers")
        number = _NUMBERS[self._code]
        end = self._start + self._count * number.size
        return [value for (value,) in number.iter_unpack(self._data[self._start : end])]

    def strings(self) -> list[str]:
        """Return the items of an array of strings. Raise `BadCheckpoint` if they are numbers."""
        if self._code != _STRING:
            raise self._wrong("contains numbers: expected strings")
        found, position = [], self._start
        for index in range(self._count):
            (size,) = _UINT64.unpack_from(self._data, position)
            position += _UINT64.size
            try:
                found.append(self._data[position : position + size].decode())
            except UnicodeDecodeError:
                raise BadCheckpoint(
                    f"{self._path}: item {index} of {self._key} is not UTF-8 text: copy or "
                    "download the file again"
                ) from None
            position += size
        return found

    def _wrong(self, why: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self._path}: {self._key} {why}")


Value: TypeAlias = bool | int | float | str | GgufArray


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location of a tensor: `num_bytes` bytes at offset `start` of the file `path`.

    The last dimension of `shape` is the length of a row, as in torch. A GGUF file stores the
    dimensions in the reverse order.
    """

    path: Path
    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of one GGUF file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    num_bytes: int  # number of bytes before the data of the tensors


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file.

    Raises:
        BadCheckpoint: The file is missing, truncated or invalid.
        UnsupportedModel: The version, the byte order or the type of a tensor is not supported.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(MAGIC) + _UINT32.size)
            _check_magic(path, begin)
            # The memory map stays open, because arrays are decoded later. Python closes the map
            # when nothing refers to it any more.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is missing: copy or download it again") from None
    except (OSError, ValueError) as error:
        if isinstance(error, BadCheckpoint | UnsupportedModel):
            raise
        reason = getattr(error, "strerror", None) or error
        raise BadCheckpoint(f"{path} cannot be read: {reason}") from None
    return _read(_Cursor(path, data), len(data))


def _check_magic(path: Path, begin: bytes) -> None:
    if not begin.startswith(MAGIC):
        raise BadCheckpoint(
            f"{path} is not a GGUF file: it begins with {begin[:4]!r}, not with {MAGIC!r}"
        )
    if len(begin) < len(MAGIC) + _UINT32.size:
        raise BadCheckpoint(f"{path} is corrupt or incomplete: it has {len(begin)} bytes")
    (version,) = _UINT32.unpack(begin[len(MAGIC) :])
    if version not in VERSIONS:
        swapped = int.from_bytes(begin[len(MAGIC) :], "big")
        if swapped in (1, *VERSIONS):
            raise UnsupportedModel(f"{path} is a big-endian GGUF file: use a little-endian one")
        raise UnsupportedModel(
            f"{path} has GGUF version {version}: expected {' or '.join(map(str, VERSIONS))}; "
            "convert the model again"
        )


class _Cursor:
    """Reads the values of the header one after another, and checks that the file contains them."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = len(MAGIC) + _UINT32.size
        self._end = min(len(data), MAX_HEADER_BYTES)

    def bad(self, why: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.path} is corrupt or incomplete: {why}. Copy or download it again"
        )

    def need(self, num_bytes: int, what: str) -> None:
        """Raise `BadCheckpoint` if fewer than `num_bytes` bytes of the header are left.

        Args:
            num_bytes: number of bytes that are read next.
            what: name of the value that is read next, for the error message.
        """
        if num_bytes <= self._end - self.position:
            return
        left = len(self.data) - self.position
        if num_bytes <= left:
            raise BadCheckpoint(
                f"{self.path} is corrupt, or its header exceeds the limit of "
                f"{MAX_HEADER_BYTES >> 20} MiB: {what} does not fit"
            )
        raise self.bad(f"{what} needs {num_bytes} bytes, but only {left} bytes follow in the file")

    def number(self, kind: struct.Struct, what: str) -> int | float:
        self.need(kind.size, what)
        (value,) = kind.unpack_from(self.data, self.position)
        self.position += kind.size
        number: int | float = value
        return number

    def count(self, kind: struct.Struct, what: str) -> int:
        return int(self.number(kind, what))

    def text(self, what: str) -> str:
        size = self.count(_UINT64, what)
        self.need(size, what)
        found = self.data[self.position : self.position + size]
        self.position += size
        try:
            return found.decode()
        except UnicodeDecodeError:
            raise self.bad(f"{what} is not UTF-8") from None

    def name(self, what: str) -> str:
        """Read the name of a key or a tensor: printable ASCII of at most `MAX_NAME_BYTES`."""
        size = self.count(_UINT64, what)
        if not 0 < size <= MAX_NAME_BYTES:
            raise self.bad(f"{what} has {size} bytes: expected 1 to {MAX_NAME_BYTES}")
        self.position -= _UINT64.size
        name = self.text(what)
        if not (name.isascii() and name.isprintable()):
            raise self.bad(f"{what} is {name!r:.80}: expected printable ASCII")
        return name

    def skip_strings(self, count: int, what: str) -> None:
        """Skip `count` strings and check that each of them is inside the header."""
        data, position, end = self.data, self.position, self._end
        for index in range(count):
            if position + _UINT64.size > end:
                self.position = position
                self.need(_UINT64.size, f"item {index} of {what}")
            (size,) = _UINT64.unpack_from(data, position)
            position += _UINT64.size
            if size > end - position:
                self.position = position
                self.need(size, f"item {index} of {what}")
            position += size
        self.position = position


def _read(cursor: _Cursor, file_bytes: int) -> GgufHeader:
    num_tensors = cursor.count(_UINT64, "the number of tensors")
    num_entries = cursor.count(_UINT64, "the number of metadata entries")
    cursor.need(num_entries * _LEAST_ENTRY_BYTES, f"metadata with {num_entries} entries")
    metadata: dict[str, Value] = {}
    for index in range(num_entries):
        key = cursor.name(f"the key of metadata entry {index}")
        if key in metadata:
            raise cursor.bad(f"{key} appears twice")
        metadata[key] = _read_value(cursor, key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        type(alignment) is not int
        or not 8 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise cursor.bad(
            f"general.alignment is {alignment!r}: expected a power of two from 8 to {MAX_ALIGNMENT}"
        )
    cursor.need(num_tensors * _LEAST_TENSOR_BYTES, f"a list of {num_tensors} tensors")
    tensors: dict[str, GgufTensor] = {}
    for index in range(num_tensors):
        tensor = _read_tensor(cursor, f"tensor {index}", alignment)
        if tensor.name in tensors:
            raise cursor.bad(f"tensor {tensor.name} appears twice")
        tensors[tensor.name] = tensor
    data_start = -(-cursor.position // alignment) * alignment
    placed = {
        name: GgufTensor(
            each.path, name, each.type, each.shape, data_start + each.start, each.num_bytes
        )
        for name, each in tensors.items()
    }
    _check_ranges(cursor, list(placed.values()), file_bytes)
    return GgufHeader(cursor.path, metadata, placed, data_start)


def _read_value(cursor: _Cursor, key: str) -> Value:
    code = cursor.count(_UINT32, f"the type of {key}")
    if code == _STRING:
        return cursor.text(key)
    if code == _ARRAY:
        return _read_array(cursor, key)
    if code not in _NUMBERS:
        raise cursor.bad(f"{key} has the unknown type {code}")
    value = cursor.number(_NUMBERS[code], key)
    if code == _BOOL:
        if value not in (0, 1):
            raise cursor.bad(f"{key} is a bool with the value {value}: expected 0 or 1")
        return bool(value)
    return value


def _read_array(cursor: _Cursor, key: str) -> GgufArray:
    code = cursor.count(_UINT32, f"the item type of {key}")
    count = cursor.count(_UINT64, f"the length of {key}")
    if code != _STRING and code not in _NUMBERS:
        raise cursor.bad(f"{key} is an array of items of the unknown type {code}")
    item_bytes = _UINT64.size if code == _STRING else _NUMBERS[code].size
    cursor.need(count * item_bytes, f"{key} with {count} items")
    array = GgufArray(cursor, key, code, count)
    if code == _STRING:
        cursor.skip_strings(count, key)
    else:
        cursor.position += count * item_bytes
    return array


def _read_tensor(cursor: _Cursor, what: str, alignment: int) -> GgufTensor:
    """Read the entry of a tensor. Its `start` is still relative to the start of the data."""
    name = cursor.name(f"the name of {what}")
    what = f"tensor {name}"
    num_dimensions = cursor.count(_UINT32, what)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.bad(f"{what} has {num_dimensions} dimensions: expected 1 to {MAX_DIMENSIONS}")
    shape = [cursor.count(_UINT64, what) for _ in range(num_dimensions)][::-1]
    if not all(0 < size <= MAX_ITEMS for size in shape) or math.prod(shape) > MAX_ITEMS:
        raise cursor.bad(f"{what} has the shape {shape}: expected 1 to {MAX_ITEMS} items in all")
    code = cursor.count(_UINT32, what)
    if code in OTHER_TYPES:
        served = ", ".join(each.name for each in TENSOR_TYPES.values())
        raise UnsupportedModel(
            f"{cursor.path}: {what} has type {OTHER_TYPES[code]}: expected one of {served}"
        )
    if code not in TENSOR_TYPES:
        raise cursor.bad(f"{what} has the unknown type {code}")
    kind = TENSOR_TYPES[code]
    if shape[-1] % kind.block_items:
        raise cursor.bad(
            f"{what} has rows of {shape[-1]} items: expected a multiple of {kind.block_items}, the "
            f"items of a {kind.name} block"
        )
    offset = cursor.count(_UINT64, what)
    if offset % alignment:
        raise cursor.bad(f"{what} is at offset {offset}: expected a multiple of {alignment}")
    num_bytes = math.prod(shape) // kind.block_items * kind.block_bytes
    return GgufTensor(cursor.path, name, kind, tuple(shape), offset, num_bytes)


def _check_ranges(cursor: _Cursor, tensors: list[GgufTensor], file_bytes: int) -> None:
    end, last = 0, ""
    for each in sorted(tensors, key=lambda each: each.start):
        if each.start < end:
            raise cursor.bad(f"the bytes of tensor {each.name} overlap those of tensor {last}")
        end, last = each.start + each.num_bytes, each.name
        if end > file_bytes:
            raise cursor.bad(
                f"tensor {each.name} ends at byte {end}, but the file has {file_bytes} bytes"
            )
