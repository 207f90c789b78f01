"""Fingerprints of checkpoint folders."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock.workers.rank.fingerprint import model_fingerprint


def checkpoint(folder: Path, seed: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    save_file({"w": weight}, folder / "model.safetensors")
    return folder


def test_only_the_files_that_are_read_count(tmp_path: Path) -> None:
    """Workers exchange KV although one folder has the same weights in a second format."""
    plain, both = (checkpoint(tmp_path / name, seed=1) for name in ("plain", "both"))
    shutil.copy(both / "model.safetensors", both / "consolidated.safetensors")
    assert model_fingerprint(plain) == model_fingerprint(both)
    assert model_fingerprint(plain) != model_fingerprint(checkpoint(tmp_path / "other", seed=2))


def test_model_without_files_has_a_fingerprint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "memory", seed=1)
    before = model_fingerprint(folder)
    (folder / "model.safetensors").unlink()
    assert model_fingerprint(folder) != before
