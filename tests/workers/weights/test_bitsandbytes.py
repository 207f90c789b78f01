"""Weights that bitsandbytes quantized and serialized are those that it dequantizes itself.

The layers of bitsandbytes make the tensors of a checkpoint, and its CPU functions the expected
weights. `tests/support/quantized_fp4.py` makes the same forms without the library.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.workers.weights.loading import load_model
from tests.support.quantized import Form, make_quantized
from tests.support.quantized_fp4 import bitsandbytes, llm_int8


@pytest.fixture(scope="module")
def library() -> Any:
    """Import bitsandbytes, which takes seconds and warns that an optional package is missing."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes as found

    return found


def quantized_layer(layer: Any, weight: Tensor) -> dict[str, Tensor]:
    """Quantize the layer's weight by moving it to the CPU; return the tensors that it saves."""
    layer.load_state_dict({"weight": weight})
    saved: dict[str, Tensor] = layer.to("cpu").state_dict()
    return saved


def four_bits(library: Any, table: str, nested: bool) -> Form:
    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        layer = library.nn.Linear4bit(
            inputs, outputs, bias=False, quant_type=table, compress_statistics=nested
        )
        saved = quantized_layer(layer, weight)
        state = layer.weight.quant_state
        assert saved.keys() == {"weight"} | {
            f"weight.{name}" for name in state.as_dict(packed=True)
        }
        return saved, library.functional.dequantize_4bit(layer.weight.data, state)

    return Form(bitsandbytes(table, nested).config, quantize)


def eight_bits(library: Any) -> Form:
    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        layer = library.nn.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False)
        saved = quantized_layer(layer, weight)
        assert saved.keys() == {"weight", "SCB", "weight_format"}
        expected = library.functional.int8_vectorwise_dequant(saved["weight"], saved["SCB"])
        return saved, expected.float()

    return Form(llm_int8().config, quantize)


def weights_in(folder: Path, form: Form) -> list[tuple[Tensor, Tensor]]:
    """Return the weights [out, in] of each quantized layer, as loaded and as the library's."""
    reference = make_quantized(folder, form)
    _, decoder = load_model(folder, "float32", torch.device("cpu"))
    pairs = []
    for names, linear in decoder.linears():
        if names == ("lm_head",):
            continue
        expected = torch.cat([reference.get_parameter(f"{name}.weight") for name in names])
        # Each product of a unit vector is one weight, without rounding.
        pairs.append((linear(torch.eye(expected.shape[1])).T, expected.detach()))
    assert len(pairs) == 8
    return pairs


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("table", ["nf4", "fp4"])
def test_weights_of_4_bits_are_exactly_those_of_the_library(
    table: str, nested: bool, library: Any, tmp_path: Path
) -> None:
    for found, expected in weights_in(tmp_path, four_bits(library, table, nested)):
        assert torch.equal(found, expected)


def test_int8_weights_are_those_of_the_library_up_to_rounding(library: Any, tmp_path: Path) -> None:
    for found, expected in weights_in(tmp_path, eight_bits(library)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
