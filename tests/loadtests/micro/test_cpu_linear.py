"""Comparison of implementations of a step's matrix products."""

import json
from pathlib import Path

import pytest

from penstock.loadtests.micro.cpu_linear import Load, main, shapes
from penstock.loadtests.micro.random_llama import Shape


def test_shapes_cover_all_weights_of_a_step() -> None:
    found = shapes(Load(layers=12))
    weights = Shape().block_weights + Shape().head_weights
    assert sum(outputs * inputs for outputs, inputs in found) == weights


def test_every_form_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "products.json"
    flags = ["--rows", "1", "9", "--layers", "1", "--rounds", "2", "--threads", "1"]
    assert main([*flags, "--save-json", str(file)]) == 0
    assert json.loads(file.read_text())
    output = capsys.readouterr().out
    assert "1 rows, panels" in output
    assert "9 rows, plain (MKL)" in output


def test_zero_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "0"]) == 2
    assert "--rows must be numbers of 1 or more, not 0" in capsys.readouterr().err


def test_unknown_variants_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--variants", "panels", "int5"]) == 2
    assert (
        "unknown variant 'int5': expected one of all, plain (MKL), panels"
        in capsys.readouterr().err
    )
