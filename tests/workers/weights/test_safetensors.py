"""Valid safetensors files are read as by the reference library; corrupt files are refused."""

import json
import random
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
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'{"a": {}, "a": {}}', "twice"),
        ([], "not a JSON object"),
        ({"a": 5}, "tensor a"),
        ({"a": tensor(0, 4, dtype="F9")}, "tensor a.*dtype 'F9'"),
        ({"a": tensor(0, 4, dtype=["F32"])}, "tensor a.*dtype"),
        ({"a": tensor(0, 4, shape=None)}, "tensor a"),
        ({"a": tensor(0, 4, shape=[-1, -1])}, "tensor a"),
        ({"a": tensor(-4, 0)}, "tensor a"),
        ({"a": tensor(4, 0)}, "tensor a"),
        ({"a": tensor(0, 8)}, "tensor a has .* bytes, expected"),
        ({"a": tensor(0.0, 4.0)}, "tensor a"),
        ({"a": tensor(0, 4, shape=[10**30])}, "tensor a has the shape"),
        ({"a": tensor(0, 4, shape=[1] * 9)}, "tensor a has the shape"),
        ({"a": tensor(0, 10**30)}, "tensor a has the shape"),
        ({"a": tensor(0, 4, shape=[2**47] * 8)}, "tensor a has .* bytes, expected"),
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
    with pytest.raises(BadCheckpoint, match="length of a header"):
        read_header(path)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.randn(30)}, path)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 11), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(BadCheckpoint, match=r"x\.safetensors is corrupt"):
            read_header(path)


def test_changed_header_byte_is_refused_or_gives_entries_within_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.randn(30), "b": torch.randn(2, 5)}, path)
    whole = bytearray(path.read_bytes())
    rng = random.Random(0)
    for _ in range(400):
        broken = bytearray(whole)
        broken[rng.randrange(len(whole) - 160)] = rng.randrange(256)
        path.write_bytes(broken)
        try:
            entries = read_header(path)
        except BadCheckpoint:
            continue
        assert all(e.start + e.num_bytes <= len(whole) for e in entries.values())


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
