"""Valid safetensors files are read as by the reference library; corrupt files are refused."""

import json
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.workers.models.config import BadCheckpoint
from penstock.workers.weights import safetensors
from penstock.workers.weights.safetensors import load_tensor, read_header


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def tensor(begin: Any, end: Any, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_tensors_written_by_the_library_are_read_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    target_dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(safetensors, "CHUNK_BYTES", 256)
    tensors = {
        "a": torch.randn(7, 33).to(dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "one": torch.randn(1).to(dtype),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    entries = read_header(path)
    assert entries.keys() == tensors.keys()
    chunk_sizes: list[int] = []
    with path.open("rb") as file:
        for name, expected in tensors.items():
            assert entries[name].shape == tuple(expected.shape)
            target = torch.full(expected.shape, torch.nan, dtype=target_dtype)
            load_tensor(entries[name], target, file, chunk_sizes.append)
            assert torch.equal(target, expected.to(target_dtype))
    assert sum(chunk_sizes) == sum(one.nbytes for one in tensors.values())
    assert max(chunk_sizes) <= 256


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "cannot be parsed as JSON"),
        (b"[" * 100_000, "cannot be parsed as JSON"),
        (b"\xff", "cannot be parsed as JSON"),
        (b'{"a": {}, "a": {}}', "twice"),
        ([], "not a JSON object"),
        ({"a": 5}, "tensor a"),
        ({"a": tensor(0, 4, dtype="F9")}, "tensor a.*dtype 'F9'"),
        ({"a": tensor(0, 4, dtype=["F32"])}, "tensor a.*dtype"),
        ({"a": tensor(0, 4, shape=None)}, "tensor a"),
        ({"a": tensor(0, 4, shape=[-1, -1])}, "tensor a"),
        ({"a": tensor(-4, 0)}, "tensor a"),
        ({"a": tensor(4, 0)}, "tensor a"),
        ({"a": tensor(0, 8)}, "tensor a has .* bytes, but its shape and dtype need"),
        ({"a": tensor(0.0, 4.0)}, "tensor a"),
        ({"a": tensor(0, 4, shape=[10**30])}, "tensor a has the shape"),
        ({"a": tensor(0, 4, shape=[1] * 9)}, "tensor a has the shape"),
        ({"a": tensor(0, 10**30)}, "tensor a has the shape"),
        (
            {"a": tensor(0, 4, shape=[2**47] * 8)},
            "tensor a has .* bytes, but its shape and dtype need",
        ),
        ({"a": tensor(6, 10)}, "8 bytes|its tensors end at byte"),
        ({"a": tensor(0, 4), "b": tensor(2, 6)}, "bytes of tensor b overlap"),
    ],
)
def test_invalid_header_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    path = write(tmp_path / "x.safetensors", header, bytes(8))
    with pytest.raises(BadCheckpoint, match=f"x.safetensors is corrupt.*({message})"):
        read_header(path)


@pytest.mark.parametrize("length", [101 << 20, 2**64 - 1])
def test_oversized_header_length_is_refused(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "x.safetensors", {}, length=length)
    with pytest.raises(BadCheckpoint, match="header length"):
        read_header(path)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.randn(30)}, path)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 11), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(BadCheckpoint, match=r"x\.safetensors is corrupt"):
            read_header(path)


MAX_CPU_SECONDS, MAX_BYTES = 1.0, 1 << 20
"""Limits of CPU time and memory for reading one header of a few hundred bytes. A valid header takes
well below 1 ms."""

HOSTILE = (b"0", b"9" * 9, b"1e9", b"[", b"{", b'"', b",", b":", b"null", b"\\ud800", b"\xff\xff")


def changed_header(whole: bytes, rng: random.Random) -> bytes:
    """Return a file of which one to four places are replaced, in the header or in its length."""
    changed, end = bytearray(whole), 8 + int.from_bytes(whole[:8], "little")
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(end)
        value = rng.choice((bytes([rng.randrange(256)]), rng.choice(HOSTILE)))
        changed[at : at + rng.choice((0, len(value)))] = value
    if rng.random() < 0.5:  # insertions shift the data: correct the length to read the whole header
        changed[:8] = (end - 8 + len(changed) - len(whole)).to_bytes(8, "little")
    return bytes(changed)


def test_changed_header_is_refused_or_gives_entries_within_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.randn(30), "b": torch.randn(2, 5)}, path)
    whole, rng, num_read = path.read_bytes(), random.Random(0), 0
    tracemalloc.start()
    try:
        for _ in range(800):
            broken = changed_header(whole, rng)
            path.write_bytes(broken)
            tracemalloc.reset_peak()
            began = time.thread_time()
            entries, message = {}, ""
            try:
                entries = read_header(path)
            except BadCheckpoint as error:
                message = str(error)
            assert time.thread_time() - began < MAX_CPU_SECONDS
            assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
            assert all(e.start + e.num_bytes <= len(broken) for e in entries.values())
            assert "\n" not in message
            num_read += bool(entries)
    finally:
        tracemalloc.stop()
    assert 0 < num_read < 800


@pytest.mark.parametrize("nesting", [b"[", b'{"a":'])
def test_header_of_the_largest_size_is_refused_in_bounded_time(
    tmp_path: Path, nesting: bytes
) -> None:
    header = nesting * (safetensors.MAX_HEADER_BYTES // len(nesting))
    path = write(tmp_path / "x.safetensors", header)
    began = time.thread_time()
    with pytest.raises(BadCheckpoint, match="cannot be parsed as JSON"):
        read_header(path)
    assert time.thread_time() - began < MAX_CPU_SECONDS


def test_file_truncated_after_reading_its_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.randn(30)}, path)
    entry = read_header(path)["a"]
    path.write_bytes(path.read_bytes()[:-3])
    with path.open("rb") as file, pytest.raises(BadCheckpoint, match="inside tensor a"):
        load_tensor(entry, torch.empty(30), file, lambda num_bytes: None)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"x\.safetensors is missing"):
        read_header(tmp_path / "x.safetensors")
