"""Compares the bytes that a decode step reads with the sizes of the tensors."""

import json
from pathlib import Path

import pytest
import torch

from penstock.loadtests.gpu.model_bytes import expected_fraction, step_bytes, weight_bytes
from penstock.loadtests.gpu.models import SHAPES, random_model, small
from penstock.workers.models.decoder import empty_decoder
from penstock.workers.models.spec import ModelSpec, read_spec

BF16 = torch.bfloat16


def spec_of(name: str, folder: Path) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(SHAPES[name].config))
    return read_spec(folder)


@pytest.mark.parametrize(("name", "billions"), [("1b", 1.236), ("8b", 8.03), ("moe", 10.4)])
def test_shapes_have_the_number_of_parameters_in_their_names(
    name: str, billions: float, tmp_path: Path
) -> None:
    spec = spec_of(name, tmp_path)
    tensors = empty_decoder(spec, BF16, torch.device("meta")).tensors()
    assert sum(each.numel() for each in tensors.values()) / 1e9 == pytest.approx(billions, rel=0.02)


def test_only_rows_of_untied_embeddings_are_read(tmp_path: Path) -> None:
    tied, untied = spec_of("1b", tmp_path), spec_of("8b", tmp_path)
    assert weight_bytes(tied, BF16, 1) == pytest.approx(2 * 1.236e9, rel=0.02)
    read = weight_bytes(untied, BF16, 1)
    assert read == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=0.02)
    assert weight_bytes(untied, BF16, 3) - read == 2 * 2 * 4096


def test_only_experts_that_get_a_token_are_read(tmp_path: Path) -> None:
    spec = spec_of("moe", tmp_path)
    experts = 2 * 16 * 128 * 3 * 2048 * 768  # bytes of all experts
    rest = weight_bytes(spec, BF16, 1) - experts * 8 / 128
    row = 2 * 2048  # bytes of one row of the embeddings
    for batch in (1, 16, 256):
        touched = experts * expected_fraction(128, 8, batch)
        assert weight_bytes(spec, BF16, batch) == pytest.approx(
            rest + touched + row * (batch - 1), rel=1e-6
        )
    assert expected_fraction(128, 8, 1) == pytest.approx(8 / 128)
    assert expected_fraction(128, 8, 256) > 0.999


def test_keys_and_values_are_read_once_per_position(tmp_path: Path) -> None:
    spec = spec_of("8b", tmp_path)
    without = step_bytes(spec, BF16, 64, 0)
    assert step_bytes(spec, BF16, 64, 1000) - without == 64 * 1000 * 32 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("name", SHAPES)
def test_random_weights_are_finite_with_the_expected_deviation(name: str, tmp_path: Path) -> None:
    config = small(SHAPES[name].config)
    decoder = random_model(tmp_path, config, torch.float32, torch.device("cpu"))
    for tensor in decoder.tensors().values():
        assert tensor.isfinite().all()
        assert tensor.dim() == 1 or 0.01 < float(tensor.std()) < 0.03
