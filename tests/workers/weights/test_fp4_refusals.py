"""Inconsistent files of MXFP4, NVFP4 and bitsandbytes: a one-line error names the tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.workers.models.config import BadCheckpoint, UnsupportedModel
from penstock.workers.weights.loading import SINGLE, load_model
from tests.support.quantized import make_quantized
from tests.support.quantized_fp4 import FP4_AND_BITSANDBYTES

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.1.mlp.down_proj"
STATE = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("mxfp4", "nvfp4", "nvfp4-modelopt", "bitsandbytes-nf4-nested", "bitsandbytes-int8")
    folder = tmp_path_factory.mktemp("made")
    for name in names:
        make_quantized(folder / name, FP4_AND_BITSANDBYTES[name])
    return {name: folder / name for name in names}


def replaced(name: str, value: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value})


def stated(**changes: Any) -> Callable[[Tensors], object]:
    """Return a function that changes fields of a bitsandbytes module's JSON object."""

    def change(tensors: Tensors) -> None:
        state = json.loads(bytes(tensors[STATE].tolist())) | changes
        tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


def bytes_of(text: bytes) -> torch.Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "mxfp4",
            replaced(f"{DOWN}.weight_scale", torch.full((192, 9), 127, dtype=torch.uint8)),
            rf"{DOWN}.weight_scale has shape \[192, 9\].*requires \[192, 10\]",
        ),
        (
            "mxfp4",
            replaced(f"{DOWN}.weight_scale", torch.full((192, 10), 255, dtype=torch.uint8)),
            rf"tensor {DOWN}.weight_scale has the scale byte 255 \(NaN\): expected 0 to 254",
        ),
        (
            "nvfp4",
            replaced(f"{DOWN}.weight_scale", torch.full((192, 20), torch.nan).to(E4M3)),
            f"tensor {DOWN}.weight_scale contains NaN",
        ),
        (
            "nvfp4",
            replaced(f"{DOWN}.weight_global_scale", torch.zeros(1)),
            f"tensor {DOWN}.weight_global_scale is 0.0: expected a finite number above 0",
        ),
        (
            "nvfp4-modelopt",
            replaced(f"{DOWN}.weight_scale_2", torch.tensor(torch.inf)),
            f"tensor {DOWN}.weight_scale_2 is inf: expected a finite number of at least 0",
        ),
        (
            "nvfp4-modelopt",
            replaced(f"{DOWN}.weight_scale", torch.ones(192, 20, dtype=torch.uint8)),
            f"{DOWN}.weight_scale has dtype U8: expected F8_E4M3",
        ),
        (
            "bitsandbytes-nf4-nested",
            lambda tensors: tensors.pop(STATE),
            f"lacks tensor {STATE}",
        ),
        (
            "bitsandbytes-nf4-nested",
            replaced(STATE, torch.zeros(5000, dtype=torch.uint8)),
            f"tensor {STATE} has 5000 bytes, but at most 4096 are allowed",
        ),
        (
            "bitsandbytes-nf4-nested",
            replaced(STATE, bytes_of(b"[1")),
            f"tensor {STATE} contains no valid JSON object",
        ),
        (
            "bitsandbytes-nf4-nested",
            stated(shape=[320, 192]),
            rf"tensor {STATE}: shape is \[320, 192\], expected \[192, 320\]",
        ),
        (
            "bitsandbytes-nf4-nested",
            stated(nested_offset="0"),
            f"tensor {STATE}: nested_offset is '0', expected a finite number",
        ),
        (
            "bitsandbytes-nf4-nested",
            replaced(f"{DOWN}.weight.quant_map", torch.linspace(-1, 1, 16)),
            f"tensor {DOWN}.weight.quant_map does not contain the 16 values of nf4",
        ),
        (
            "bitsandbytes-int8",
            replaced(f"{DOWN}.weight_format", torch.tensor(2, dtype=torch.uint8)),
            f"tensor {DOWN}.weight_format is 2: expected 0",
        ),
        (
            "bitsandbytes-int8",
            replaced(f"{DOWN}.SCB", torch.ones(320)),
            rf"{DOWN}.SCB has shape \[320\].*requires \[192\]",
        ),
    ],
)
def test_wrong_tensors_are_named(
    made: dict[str, Path],
    tmp_path: Path,
    name: str,
    change: Callable[[Tensors], object],
    message: str,
) -> None:
    tensors = load_file(made[name] / SINGLE)
    change(tensors)
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text((made[name] / "config.json").read_text())
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=message) as error:
        load_model(tmp_path, "auto", CPU)
    assert "\n" not in str(error.value)
