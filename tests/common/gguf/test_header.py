"""The header of GGUF files that the `gguf` package wrote, and of files with false sizes."""

import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.common.checkpoint_errors import BadCheckpoint, UnsupportedModel
from penstock.common.gguf.header import (
    MAX_HEADER_BYTES,
    MAX_ITEMS,
    GgufArray,
    GgufHeader,
    read_header,
)

UINT32, BOOL, STRING, ARRAY = 4, 7, 8, 9
F32, F16, Q8_0, IQ4_XS = 0, 1, 8, 23


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(
    name: str = "a", shape: tuple[int, ...] = (32, 2), kind: int = Q8_0, offset: int = 0
) -> bytes:
    """Return the entry of a tensor; `shape` has the row length first, as in a file."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def whole(
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Return a file with `data` zero bytes after the aligned header."""
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


GOOD = whole(
    (
        entry("general.architecture", STRING, text("llama")),
        entry("a.flag", BOOL, b"\x01"),
        entry("a.words", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("yz")),
        entry("a.numbers", ARRAY, struct.pack("<IQ2f", 6, 2, 0.5, 2.0)),
    ),
    (tensor(), tensor("b", (3,), F32, 96)),
    data=96 + 12,
)


def read(path: Path, content: bytes) -> GgufHeader:
    path.write_bytes(content)
    return read_header(path)


def test_everything_that_the_gguf_package_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kinds: dict[str, Any] = {
        "uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 1 << 31,
        "int32": -(1 << 30), "float32": 0.5, "uint64": 1 << 60, "int64": -(1 << 60),
        "float64": 0.1, "bool": True, "string": "Grüße \U0001f600",
    }  # fmt: skip
    for name, value in kinds.items():
        getattr(writer, f"add_{name}")(f"k.{name}", value)
    writer.add_array("k.words", ["", "ä", "b c"])
    writer.add_array("k.numbers", [1, -2, 3])
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    writer.add_tensor("rows", rows)
    writer.add_tensor("half", rows.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header = read_header(path)
    assert {key: header.metadata[f"k.{key}"] for key in kinds} == kinds
    words, numbers = header.metadata["k.words"], header.metadata["k.numbers"]
    assert isinstance(words, GgufArray)
    assert isinstance(numbers, GgufArray)
    assert (words.strings(), numbers.numbers()) == (["", "ä", "b c"], [1, -2, 3])
    found = header.tensors["rows"]
    assert (found.shape, found.type.name) == ((3, 2), "F32")
    data = path.read_bytes()[found.start : found.start + found.num_bytes]
    assert data == rows.tobytes()
    with pytest.raises(BadCheckpoint, match=r"k\.words contains strings: expected numbers$"):
        words.numbers()
    with pytest.raises(BadCheckpoint, match=r"k\.numbers contains numbers: expected strings$"):
        numbers.strings()


LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"begins with b'', not with b'GGUF'"),
    "other file": (b"PK\3\4" + bytes(60), r"not a GGUF file: it begins with b'PK"),
    "magic only": (b"GGUF", "it has 4 bytes"),
    "version 1": (whole(version=1), "has GGUF version 1: expected 2 or 3"),
    "big endian": (b"GGUF\0\0\0\3" + bytes(16), "is a big-endian GGUF file"),
    "no counts": (b"GGUF\3\0\0\0", "the number of tensors needs 8 bytes, but only 0 bytes"),
    "many entries": (whole(counts=(0, 1 << 60)), f"metadata with {1 << 60} entries needs"),
    "many tensors": (whole(counts=(1 << 60, 0)), f"a list of {1 << 60} tensors needs"),
    "long key": (whole((text("k" * 300),)), "metadata entry 0 has 300 bytes: expected 1 to 255"),
    "empty key": (whole((entry("", BOOL, b"\0"),)), "key of metadata entry 0 has 0 bytes"),
    "unprintable key": (whole((entry("a\nb", BOOL, b"\0"),)), r"'a\\nb': expected printable ASCII"),
    "key twice": (whole((entry("k", BOOL, b"\0"),) * 2), "k appears twice"),
    "unknown type": (whole((entry("k", 13, bytes(8)),)), "k has the unknown type 13"),
    "bool": (whole((entry("k", BOOL, b"\2"),)), "k is a bool with the value 2: expected 0 or 1"),
    "long string": (
        whole((entry("k", STRING, struct.pack("<Q", 1 << 40)),)),
        f"k needs {1 << 40} bytes, but only 19 bytes follow",
    ),
    "not UTF-8": (whole((entry("k", STRING, text(b"\xff")),)), "k is not UTF-8"),
    "long array": (
        whole((entry("k", ARRAY, struct.pack("<IQ", UINT32, 1 << 62)),)),
        f"k with {1 << 62} items needs {1 << 64} bytes",
    ),
    "array of arrays": (
        whole((entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(20)),)),
        "k is an array of items of the unknown type 9",
    ),
    "string in array": (
        whole((entry("k", ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 50)),)),
        f"item 0 of k needs {1 << 50} bytes",
    ),
    "alignment": (
        whole((entry("general.alignment", UINT32, struct.pack("<I", 48)),)),
        "general.alignment is 48: expected a power of two from 8 to 65536",
    ),
    "alignment of text": (
        whole((entry("general.alignment", STRING, text("32")),)),
        "general.alignment is '32': expected a power of two",
    ),
    "no dimensions": (whole((), (tensor(shape=()),)), "tensor a has 0 dimensions: expected 1 to 4"),
    "five dimensions": (
        whole((), (tensor(shape=(32, 1, 1, 1, 1)),)), "tensor a has 5 dimensions: expected 1 to 4",
    ),
    "no rows": (whole((), (tensor(shape=(32, 0)),)), r"tensor a has the shape \[0, 32\]: expected"),
    "huge shape": (
        whole((), (tensor(shape=(1 << 63, 1 << 63)),)),
        rf"tensor a has the shape \[{1 << 63}, {1 << 63}\]: expected 1 to {MAX_ITEMS} items",
    ),
    "unknown tensor type": (
        whole((), (tensor(kind=99),)), "tensor a has the unknown type 99",
    ),
    "rows of parts of blocks": (
        whole((), (tensor(shape=(33, 2)),), 500),
        "tensor a has rows of 33 items: expected a multiple of 32, the items of a Q8_0 block",
    ),
    "unaligned": (
        whole((), (tensor(offset=8),), 500), "tensor a is at offset 8: expected a multiple of 32",
    ),
    "tensor twice": (whole((), (tensor(),) * 2, 500), "tensor a appears twice"),
    "overlap": (
        whole((), (tensor(), tensor("b", offset=64)), 500),
        "the bytes of tensor b overlap those of tensor a",
    ),
    "offset beyond the file": (
        whole((), (tensor(offset=1 << 40),), 500),
        r"tensor a ends at byte \d+, but the file has \d+ bytes",
    ),
    "half of the data": (whole((), (tensor(),), 67), r"ends at byte 164, but .* has 163 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_a_lie_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    content, words = LIES[case]
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=words) as raised:
        read(tmp_path / "m.gguf", content)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(str(tmp_path / "m.gguf"))


def test_type_that_is_not_served_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match="tensor a has type IQ4_XS: expected one of F32, F16, Q4_0"
    ):
        read(tmp_path / "m.gguf", whole((), (tensor(shape=(256, 1), kind=IQ4_XS),), 500))


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"m\.gguf is missing"):
        read_header(tmp_path / "m.gguf")
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        read_header(tmp_path)


def test_every_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    read(path, GOOD)
    for size in range(len(GOOD)):
        with pytest.raises(BadCheckpoint):
            read(path, GOOD[:size])


def test_header_larger_than_its_limit_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    count = MAX_HEADER_BYTES // 8
    with path.open("wb") as file:
        file.write(whole((entry("k", ARRAY, struct.pack("<IQ", STRING, count)),)))
        file.truncate(2 * MAX_HEADER_BYTES)
    with pytest.raises(BadCheckpoint, match=r"k with \d+ items does not fit"):
        read_header(path)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "m.gguf"


NUMBERS = st.one_of(
    st.sampled_from([0, 1, 7, 9, 32, 255, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]),
    st.integers(0, (1 << 64) - 1),
)
CHANGES = st.lists(
    st.tuples(st.integers(0, len(GOOD) - 1), st.sampled_from((1, 4, 8)), NUMBERS),
    min_size=1,
    max_size=4,
)


MAX_CPU_SECONDS = 2.0
"""Limit of the CPU time for reading one changed header under `tracemalloc`. A valid header takes a
few milliseconds."""


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=CHANGES, cut=st.integers(0, len(GOOD)))
def test_changed_header_is_read_within_the_file_or_refused(
    changes: list[tuple[int, int, int]], cut: int, fuzzed: Path
) -> None:
    content = bytearray(GOOD)
    for at, size, number in changes:
        content[at : at + size] = number.to_bytes(8, "little")[:size]
    del content[len(GOOD) - cut // 8 :]
    message, began = "", time.thread_time()
    tracemalloc.start()
    try:
        header = read(fuzzed, bytes(content))
        for each in header.tensors.values():
            assert header.num_bytes <= each.start
            assert each.start + each.num_bytes <= len(content)
        for value in header.metadata.values():
            if isinstance(value, GgufArray):
                assert _decoded(value) == len(value) <= len(content)
    except (BadCheckpoint, UnsupportedModel) as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.thread_time() - began < MAX_CPU_SECONDS
    assert "\n" not in message
    assert peak < 1 << 20


def _decoded(array: GgufArray) -> int:
    """Return the number of items of an array, after decoding them as numbers or strings."""
    try:
        return len(array.numbers())
    except BadCheckpoint:
        return len(array.strings())
