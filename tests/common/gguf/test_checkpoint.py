"""Models in one or several GGUF files."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from penstock.common.checkpoint_errors import BadCheckpoint, UnsupportedModel
from penstock.common.gguf.checkpoint import is_gguf, model_name, open_gguf


def write(path: Path, names: str, **entries: int | str) -> Path:
    """Write a file with a small tensor for each character of `names`."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in entries.items():
        key = key.replace("__", ".")
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint16(key, value)
    for name in names:
        writer.add_tensor(name, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def part(folder: Path, number: int, names: str, count: int = 2, total: int = 3) -> Path:
    path = folder / f"m-{number + 1:05}-of-00002.gguf"
    return write(path, names, split__no=number, split__count=count, split__tensors__count=total)


def test_split_model_has_the_tensors_of_all_files(tmp_path: Path) -> None:
    first, second = part(tmp_path, 0, "ab"), part(tmp_path, 1, "c")
    checkpoint = open_gguf(first)
    assert {name: each.path for name, each in checkpoint.tensors.items()} == {
        "a": first,
        "b": first,
        "c": second,
    }
    assert model_name(first) == "m"


def test_missing_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"m-00002-of-00002\.gguf is missing"):
        open_gguf(part(tmp_path, 0, "ab"))


def test_later_part_names_the_first_one(tmp_path: Path) -> None:
    part(tmp_path, 0, "ab")
    with pytest.raises(UnsupportedModel, match=r"not the first file .* give .*m-00001-of-00002"):
        open_gguf(part(tmp_path, 1, "c"))


def test_parts_of_different_models_are_refused(tmp_path: Path) -> None:
    first = part(tmp_path, 0, "ab")
    part(tmp_path, 1, "c", count=3)
    with pytest.raises(BadCheckpoint, match=r"split\.count is 3, expected 1 and 2"):
        open_gguf(first)
    part(tmp_path, 1, "b")
    with pytest.raises(BadCheckpoint, match="tensor b is also in"):
        open_gguf(first)
    part(tmp_path, 1, "cd")
    with pytest.raises(
        BadCheckpoint, match=r"tensors\.count is 3, but the model's files have 4 tensors"
    ):
        open_gguf(first)


def test_renamed_part_is_refused(tmp_path: Path) -> None:
    renamed = part(tmp_path, 0, "ab").rename(tmp_path / "model.gguf")
    with pytest.raises(
        BadCheckpoint, match="is one of 2 files of a model: expected the file names"
    ):
        open_gguf(renamed)


def test_adapter_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "a", general__type="adapter")
    with pytest.raises(UnsupportedModel, match=r"general\.type is 'adapter', expected 'model'"):
        open_gguf(path)


def test_files_and_missing_gguf_names_are_no_folders(tmp_path: Path) -> None:
    (tmp_path / "sha256-0123").write_bytes(b"")
    (tmp_path / "folder.gguf").mkdir()
    assert is_gguf(tmp_path / "sha256-0123")
    assert is_gguf(tmp_path / "missing.gguf")
    assert not is_gguf(tmp_path / "folder.gguf")
    assert not is_gguf(tmp_path)
