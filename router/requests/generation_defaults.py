"""The model's own sampling defaults, read from `generation_config.json` as vLLM reads them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.common.gguf.checkpoint import is_gguf
from penstock.common.gguf.documents import generation_config_of
from penstock.common.sampling_params import (
    BEAM_SEARCH_VALUES,
    InvalidParameterError,
    SamplingLimits,
    SamplingParams,
)
from penstock.common.value_text import value_text

FILE_NAME = "generation_config.json"
KINDS: Mapping[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
}
"""Fields of the file that are sampling parameters of the same name."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values for the sampling parameters that a request leaves out."""

    sampling: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None

    def sampling_params(self, given: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters `given`, with values for the absent ones.

        An absent parameter gets the model's default or, if there is none, the one of
        `SamplingParams`. A beam search does not sample, so the model's sampling defaults are not
        used for it.
        """
        is_beam_search = given.get("use_beam_search")
        defaults = {
            name: value
            for name, value in self.sampling.items()
            if not (is_beam_search and name in BEAM_SEARCH_VALUES)
        }
        return SamplingParams(**{**defaults, **given})

    def default_max_tokens(self, own: int | None = None) -> int | None:
        """Return the lower of the model's default and the API's default `own`; None without any."""
        return min((each for each in (self.max_tokens, own) if each is not None), default=None)


def read_generation_defaults(folder: Path, limits: SamplingLimits) -> GenerationDefaults:
    """Return the defaults in a checkpoint's `generation_config.json`, if that file exists.

    For a GGUF file, its entries below `general.sampling.` are used instead.

    `do_sample: false` means temperature 0.

    Raises:
        ValueError: the file is not a JSON object, or has a value that no request may have.
    """
    path = folder if is_gguf(folder) else folder / FILE_NAME
    if not path.is_file():
        return GenerationDefaults()
    found = generation_config_of(path) if is_gguf(folder) else _read(path)
    sampling = {name: _number(path, found, name, kinds) for name, kinds in KINDS.items()}
    given = {name: value for name, value in sampling.items() if value is not None}
    if found.get("do_sample") is False:
        given["temperature"] = 0.0
    max_tokens = _number(path, found, "max_new_tokens", (int,))
    if max_tokens is not None and max_tokens < 1:
        raise _wrong(path, f"max_new_tokens must be at least 1, not {max_tokens}")
    defaults = GenerationDefaults(given, max_tokens)
    try:
        defaults.sampling_params({}).validate(limits, vocab_size=1)
    except InvalidParameterError as error:
        raise _wrong(path, str(error)) from error
    return defaults


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"it is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise _wrong(path, f"expected a JSON object, not {value_text(found)}")
    return found


def _number(path: Path, found: Mapping[str, Any], name: str, kinds: tuple[type, ...]) -> Any:
    """Return the value of a field, or None if the field is absent or null."""
    value = found.get(name)
    if value is None or (isinstance(value, kinds) and not isinstance(value, bool)):
        return value
    expected = "a number" if float in kinds else "a whole number"
    raise _wrong(path, f"{name} is {value_text(value)}: expected {expected}")


def _wrong(path: Path, why: str) -> ValueError:
    return ValueError(f"{path}: {why}; set generation_config to 'none' to ignore this file")
