"""Comparison of the formats of the KV cache: errors, times and answers."""

import json
from pathlib import Path

import pytest
import torch

from penstock.loadtests.micro import kv_cache_formats
from penstock.loadtests.micro.kv_cache_formats import Options, attention_error, equal_fraction


@pytest.mark.slow
def test_every_format_is_compared_with_float32(tmp_path: Path) -> None:
    sizes = ["--prompts", "3", "--output-len", "4", "--context", "48", "--batch", "2"]
    file, threads = tmp_path / "found.json", torch.get_num_threads()
    try:
        given = [*sizes, "--rounds", "1", "--save-json", str(file)]
        assert kv_cache_formats.main(given) == 0
    finally:
        torch.set_num_threads(threads)
    text = file.read_text()
    for name in kv_cache_formats.NAMES:
        assert f'"{name}"' in text
    assert json.loads(text)


def test_error_of_attention_is_that_of_the_format() -> None:
    options = Options(context=64, head_dim=64)
    exact, narrow, int8, fp8 = (
        attention_error(options, name, False) for name in ("float32", "bfloat16", "int8", "fp8")
    )
    assert exact < 1e-5 < narrow < int8 < fp8 < 2**-4


@pytest.mark.parametrize(
    ("found", "fraction"), [([1, 2, 3, 4], 1.0), ([1, 2, 9, 4], 0.5), ([1], 0.25), ([5], 0.0)]
)
def test_fraction_before_the_first_different_token(found: list[int], fraction: float) -> None:
    assert equal_fraction(found, [1, 2, 3, 4]) == fraction
