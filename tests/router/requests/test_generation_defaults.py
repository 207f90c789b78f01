"""Defaults of sampling parameters in `generation_config.json`."""

from pathlib import Path

import pytest

from penstock.common.sampling_params import SamplingLimits, SamplingParams
from penstock.router.requests.generation_defaults import (
    GenerationDefaults,
    read_generation_defaults,
)

LIMITS = SamplingLimits()


def read(folder: Path, text: str) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(text)
    return read_generation_defaults(folder, LIMITS)


def test_model_without_the_file_has_our_defaults(tmp_path: Path) -> None:
    defaults = read_generation_defaults(tmp_path, LIMITS)
    assert defaults.sampling_params({}) == SamplingParams()
    assert defaults.default_max_tokens() is None
    assert defaults.default_max_tokens(16) == 16


def test_null_means_absent(tmp_path: Path) -> None:
    defaults = read(tmp_path, '{"temperature": null, "max_new_tokens": null, "top_p": 0.5}')
    assert defaults.sampling_params({}) == SamplingParams(top_p=0.5)
    assert defaults.default_max_tokens() is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "expected a JSON object"),
        ("{", "not valid JSON"),
        ('{"temperature": "warm"}', "temperature is 'warm'"),
        ('{"top_k": 2.5}', "top_k is 2.5"),
        ('{"top_k": true}', "top_k is true"),
        ('{"temperature": 7}', "temperature must be"),
        ('{"top_p": NaN}', "top_p must be"),
        ('{"max_new_tokens": 0}', "max_new_tokens must be"),
    ],
)
def test_invalid_file_is_refused_with_a_way_out(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        read(tmp_path, text)
    assert "generation_config.json" in str(error.value)
    assert "set generation_config to 'none'" in str(error.value)
