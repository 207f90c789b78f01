"""W8A8 on a GPU: which layers multiply quantized activations, and what they compute.

The tests run interpreted on a CPU (`make kernels`), or on a GPU (`make gpu`).
"""

from pathlib import Path
from unittest import mock

import pytest
import torch

from penstock.kernels.linear import op, w8a8
from penstock.kernels.linear.quantized import TritonQuantizedLinear
from penstock.kernels.linear.w8a8 import (
    W8A8Linear,
    dequantize,
    has_w8a8_products,
    quantize_activations_reference,
)
from penstock.kernels.triton_common.launch import DeviceInfo
from penstock.workers.layers import online_method, packing
from penstock.workers.layers.linear import Linear
from penstock.workers.weights import quantized_method
from penstock.workers.weights.loading import load_model
from tests.support.devices import DEVICE, ON_GPU, runs_kernels
from tests.support.quantized import FLOAT, FORMS, make_quantized

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not runs_kernels(), reason="needs TRITON_INTERPRET=1, or a GPU"),
]

ADA, AMPERE = (DeviceInfo(name, shared_bytes=99 << 10) for name in ("sm_89", "sm_86"))


@pytest.fixture(autouse=True)
def no_cpu_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not use the CPU's INT8 products, so that an interpreted model has those of a GPU."""
    for module in (packing, online_method, quantized_method):
        monkeypatch.setattr(module, "int8_unsupported_reason", lambda *_: "not on a GPU")
    assert op.int8_unsupported_reason(torch.device("cuda"), torch.float32)


@pytest.fixture
def needs_fp8() -> None:
    if not has_w8a8_products("fp8", DEVICE):
        pytest.skip("the GPU has no tensor cores for FP8")


def check_product(linear: Linear, weight: torch.Tensor, has_groups: bool) -> None:
    """Compare with the product of dequantized weights and quantized activations in float64."""
    assert isinstance(linear.packed, W8A8Linear)
    num_inputs = weight.shape[1]
    x = torch.randn(5, num_inputs)
    codes, scales = quantize_activations_reference(
        x, linear.packed.form, 128 if has_groups else num_inputs, linear.packed.input_limit
    )
    expected = dequantize(codes, scales) @ weight.double().T
    found = linear(x.to(DEVICE)).cpu()
    # The tensor cores of a GPU keep about 14 bits of a sum of FP8 products.
    tolerance = 2e-3 if ON_GPU and linear.packed.form == "fp8" else 1e-5
    assert (found - expected).norm() < tolerance * expected.norm()


@pytest.mark.usefixtures("needs_fp8")
@pytest.mark.parametrize(
    "name",
    ["fp8-blocks", "fp8-block-dynamic", "fp8-hugging-face-tensor", "fp8-tensor-static",
     "fp8-channel-dynamic", "int8-products", "int8-static"],
)  # fmt: skip
def test_checkpoints_with_quantized_activations_use_w8a8_products(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make_quantized(tmp_path, FORMS[name])
    _, decoder = load_model(tmp_path, "float32", DEVICE)
    weights = reference.state_dict()
    checked = 0
    for names, linear in decoder.linears():
        if isinstance(linear.packed, W8A8Linear):
            fused = torch.cat([weights[f"{each}.weight"] for each in names])
            check_product(linear, fused, has_groups="block" in name)
            is_static = "static" in name or name == "fp8-hugging-face-tensor"
            assert (linear.packed.input_limit > 0) == is_static
            checked += 1
    assert checked == 4 * len(decoder.layers)
    assert not [each for each in caplog.records if "weight-only" in each.message]


@pytest.mark.parametrize("name", ["int8-channel", "int8-asymmetric", "int8-groups", "awq"])
def test_checkpoints_with_float_activations_stay_weight_only(name: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, FORMS[name])
    _, decoder = load_model(tmp_path, "float32", DEVICE)
    kinds = {type(linear.packed) for _, linear in decoder.linears()}
    assert TritonQuantizedLinear in kinds
    assert W8A8Linear not in kinds


@pytest.mark.usefixtures("needs_fp8")
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_quantization_while_loading_uses_w8a8_products(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    make_quantized(tmp_path, FLOAT)
    _, decoder = load_model(tmp_path, "float32", DEVICE, quantization=form, deterministic=True)
    for _, linear in decoder.linears():
        assert isinstance(linear.packed, W8A8Linear)
        weight = dequantize(linear.packed.weight.cpu(), linear.packed.scales.T.cpu())
        check_product(linear, weight, has_groups=False)


@pytest.mark.parametrize("name", ["fp8-blocks", "int8-products"])
def test_gpu_without_tensor_cores_for_the_codes_is_weight_only_and_the_log_says_so(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_quantized(tmp_path, FORMS[name])
    with mock.patch.object(w8a8, "device_info", return_value=AMPERE):
        _, decoder = load_model(tmp_path, "float32", DEVICE)
        lacks = name == "fp8-blocks"
        kind = TritonQuantizedLinear if lacks else W8A8Linear
        assert kind in {type(linear.packed) for _, linear in decoder.linears()}
        assert any("weight-only" in each.message for each in caplog.records) == lacks
        caplog.clear()
        make_quantized(tmp_path / "float", FLOAT)
        load_model(tmp_path / "float", "float32", DEVICE, quantization="fp8")
        [record] = [each for each in caplog.records if "weight-only" in each.message]
        assert "FP8 matrix multiplication is not available on this" in record.message


def test_deterministic_mode_needs_w8a8_products(tmp_path: Path) -> None:
    for name, is_allowed in (("fp8-channel-dynamic", True), ("awq", False)):
        make_quantized(tmp_path / name, FORMS[name])
        with mock.patch.object(w8a8, "device_info", return_value=ADA):
            if is_allowed:
                load_model(tmp_path / name, "float32", DEVICE, deterministic=True)
                continue
            with pytest.raises(ValueError, match="deterministic mode is not available: quantized"):
                load_model(tmp_path / name, "float32", DEVICE, deterministic=True)
    make_quantized(tmp_path / "float", FLOAT)
    with (
        mock.patch.object(w8a8, "device_info", return_value=AMPERE),
        pytest.raises(ValueError, match="deterministic mode is not available: fp8 weights need"),
    ):
        load_model(tmp_path / "float", "float32", DEVICE, quantization="fp8", deterministic=True)
