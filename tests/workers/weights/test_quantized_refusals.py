"""Quantized checkpoints with wrong tensors or options: a one-line error names the tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.kernels.linear.cpu_packed_int4 import PackedLinearInt4, has_int4_loops
from penstock.kernels.linear.quantized import DequantizingLinear
from penstock.workers.models.config import BadCheckpoint, UnsupportedModel
from penstock.workers.models.spec import check_config
from penstock.workers.weights import loading
from penstock.workers.weights.loading import SINGLE, load_model
from penstock.workers.weights.safetensors import SafetensorsEntry
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized import FORMS, make_quantized
from tests.support.quantized_fp4 import BITSANDBYTES

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
Q, K = (f"model.layers.0.self_attn.{name}_proj" for name in "qk")
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = (
        *("fp8-blocks", "fp8-tensor-static", "gptq-4-act-order", "awq", "packed-4-groups"),
        *("int8-asymmetric", "int8-groups", *BITSANDBYTES),
    )
    folder = tmp_path_factory.mktemp("made")
    for name in names:
        make_quantized(folder / name, (FORMS | BITSANDBYTES)[name])
    return {name: folder / name for name in names}


def changed(source: Path, folder: Path, change: Callable[[Tensors], object], **config: Any) -> Path:
    """Copy a checkpoint with changed tensors and a changed `quantization_config`."""
    tensors = load_file(source / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)
    values = json.loads((source / "config.json").read_text())
    values["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def same(tensors: Tensors) -> None:
    pass


def replaced(name: str, value: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value})


def removed(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8-blocks", removed(f"{Q}.weight_scale_inv"), f"lacks tensor {Q}.weight_scale_inv"),
        ("fp8-blocks", removed(f"{Q}.weight"), f"lacks tensor {Q}.weight "),
        (
            "fp8-blocks",
            replaced(f"{Q}.weight_scale_inv", torch.ones(2, 3)),
            rf"{Q}.weight_scale_inv has shape \[2, 3\].*requires \[2, 2\]",
        ),
        (
            "fp8-blocks",
            replaced(f"{Q}.weight_scale_inv", torch.ones(2, 2, dtype=torch.int8)),
            f"{Q}.weight_scale_inv has dtype I8: expected F32",
        ),
        (
            "fp8-blocks",
            replaced(f"{Q}.weight_scale_inv", torch.ones(2, 2).to(torch.float8_e8m0fnu)),
            f"{Q}.weight_scale_inv has dtype F8_E8M0: expected F32",
        ),
        ("fp8-blocks", replaced(f"{Q}.zeros", torch.ones(2)), f"unexpected tensor {Q}.zeros"),
        (
            "fp8-tensor-static",
            replaced(f"{Q}.weight_scale", torch.ones(2)),
            rf"{Q}.weight_scale has shape \[2\].*requires \[1\]",
        ),
        (
            "fp8-tensor-static",
            replaced(f"{Q}.input_scale", torch.ones(2)),
            rf"{Q}.input_scale has shape \[2\].*requires \[1\]",
        ),
        ("gptq-4-act-order", removed(f"{DOWN}.g_idx"), f"lacks tensor {DOWN}.g_idx"),
        ("gptq-4-act-order", removed(f"{DOWN}.qzeros"), f"lacks tensor {DOWN}.qzeros"),
        (
            "gptq-4-act-order",
            replaced(f"{DOWN}.g_idx", torch.full((320,), 10, dtype=torch.int32)),
            f"tensor {DOWN}.g_idx has group numbers from 10 to 10: expected 0 to 9",
        ),
        (
            "gptq-4-act-order",
            replaced(f"{Q}.g_idx", torch.zeros(192, dtype=torch.int32)),
            f"{Q}, .*v_proj: matrices with different groups",
        ),
        (
            "gptq-4-act-order",
            replaced(f"{DOWN}.bias", torch.ones(192)),
            f"tensor {DOWN}.bias has values other than zero, but config.json describes a model "
            "without this bias",
        ),
        (
            "gptq-4-act-order",
            replaced(f"{DOWN}.bias", torch.zeros(191)),
            f"unexpected tensor {DOWN}.bias",
        ),
        ("awq", replaced(f"{DOWN}.bias", torch.zeros(192)), f"unexpected tensor {DOWN}.bias"),
        (
            "awq",
            replaced(f"{DOWN}.qweight", torch.ones(320, 12, dtype=torch.int32)),
            rf"{DOWN}.qweight has shape \[320, 12\].*requires \[320, 24\]",
        ),
        (
            "packed-4-groups",
            replaced(f"{DOWN}.weight_packed", torch.ones(192, 40, dtype=torch.uint8)),
            f"{DOWN}.weight_packed has dtype U8: expected I32",
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
    folder = changed(made[name], tmp_path, change)
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=message) as error:
        load_model(folder, "auto", CPU)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            "awq",
            {"group_size": 128},
            "has 192 inputs: expected a multiple of 128, the group size",
        ),
        (
            "packed-4-groups",
            {"ignore": ["lm_head", Q]},
            f"{Q} is not quantized, but {K} is packed int4 groups of ",
        ),
        (
            "fp8-blocks",
            {"modules_to_not_convert": [DOWN]},
            f"has the unexpected tensor {DOWN}.weight_scale_inv",
        ),
    ],
)
def test_configuration_of_other_tensors_is_refused(
    made: dict[str, Path], tmp_path: Path, name: str, config: dict[str, Any], message: str
) -> None:
    folder = changed(made[name], tmp_path, same, **config)
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=message):
        load_model(folder, "auto", CPU)


def test_fused_modules_with_different_activations_are_refused(
    made: dict[str, Path], tmp_path: Path
) -> None:
    [group] = quantization_config(made["packed-4-groups"])["config_groups"].values()
    other = {**group, "targets": ["re:.*k_proj"]}
    other["input_activations"] = {"num_bits": 8, "type": "int", "symmetric": True}
    groups = {"group_0": other, "group_1": group}
    folder = changed(made["packed-4-groups"], tmp_path, same, config_groups=groups)
    with pytest.raises(UnsupportedModel, match=f"but {K} is .* with another activations: modules"):
        load_model(folder, "auto", CPU)


def test_all_tensors_are_checked_before_the_first_is_read(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(SafetensorsEntry, "load", fail)
    folder = changed(made["awq"], tmp_path, removed(f"{DOWN}.scales"))
    with pytest.raises(BadCheckpoint, match=f"lacks tensor {DOWN}.scales"):
        load_model(folder, "auto", CPU)


def test_module_stored_as_floats_is_not_quantized(made: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for suffix in ("qweight", "qzeros", "scales"):
            del tensors[f"{DOWN}.{suffix}"]
        tensors[f"{DOWN}.weight"] = torch.randn(192, 320)

    folder = changed(made["awq"], tmp_path, change)
    decoder = load_model(folder, "auto", CPU)[1]
    methods = {" ".join(names): linear.method.name for names, linear in decoder.linears()}
    assert methods[DOWN] == "float"
    assert methods[DOWN.replace("1", "0")] == "awq int4 groups of 64"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "int8 is not available: .* quantized already .awq int4"),
        ({"dtype": "bfloat16", "deterministic": True}, "deterministic mode is not available"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    made: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    given = {"dtype": "auto", **options}
    with pytest.raises(ValueError, match=message):
        load_model(made["awq"], device=CPU, **given)


def test_products_that_the_device_lacks_are_logged_once(
    made: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    load_model(made["fp8-tensor-static"], "auto", CPU)
    load_model(made["awq"], "auto", CPU)
    [record] = [each for each in caplog.records if "weight-only" in each.message]
    assert (
        "FP8 matrix multiplication is not available for fp8 per tensor, static activations on "
        "cpu with float32" in record.message
    )


@pytest.mark.parametrize("name", ["int8-asymmetric", "int8-groups"])
def test_w8a8_that_no_kernel_multiplies_is_logged(
    name: str, made: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [group] = quantization_config(made[name])["config_groups"].values()
    group["input_activations"] = {"num_bits": 8, "type": "int", "symmetric": True}
    load_model(changed(made[name], tmp_path, same, config_groups={"group_0": group}), "auto", CPU)
    [record] = [each for each in caplog.records if "weight-only" in each.message]
    assert "INT8 matrix multiplication is not available for int8 int8" in record.message
    assert ("with zero points" in record.message) == (name == "int8-asymmetric")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("fp8-blocks", "weight_scale_inv"),
        ("fp8-tensor-static", "weight_scale"),
        ("int8-groups", "weight_scale"),
        ("packed-4-groups", "weight_scale"),
        ("gptq-4-act-order", "scales"),
        ("awq", "scales"),
        ("bitsandbytes-nf4", "weight.absmax"),
        ("bitsandbytes-nf4-nested", "weight.nested_absmax"),
        ("bitsandbytes-int8", "SCB"),
        ("bitsandbytes-nf4-nested", "weight.nested_quant_map"),
    ],
)
def test_scales_that_are_not_finite_are_refused(
    name: str, suffix: str, value: float, made: dict[str, Path], tmp_path: Path
) -> None:
    tensor = f"{DOWN}.{suffix}"

    def change(tensors: dict[str, Any]) -> None:
        tensors[tensor].view(-1)[0] = value

    with pytest.raises(BadCheckpoint, match=f"tensor {tensor} .* NaN or infinite"):
        load_model(changed(made[name], tmp_path, change), "auto", CPU)


def test_four_bit_weights_with_int8_activations_use_products_of_integers_if_the_cpu_has_them(
    made: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = made["packed-4-groups"]
    [group] = quantization_config(source)["config_groups"].values()
    group["input_activations"] = {"num_bits": 8, "type": "int", "symmetric": True}
    folder = changed(source, tmp_path, same, config_groups={"group_0": group})
    _, weight_only = load_model(source, "auto", CPU)
    _, decoder = load_model(folder, "auto", CPU)
    x = torch.randn(3, 192)
    for (_, one), (_, other) in zip(decoder.linears(), weight_only.linears(), strict=True):
        if isinstance(other.packed, DequantizingLinear):
            assert isinstance(one.packed, PackedLinearInt4) == has_int4_loops()
            if other.packed.num_inputs == 192:
                ours, expected = one(x), other(x)
                assert (ours - expected).norm() < 0.02 * expected.norm()
    assert any("weight-only" in each.message for each in caplog.records) != has_int4_loops()


def quantization_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def test_bfloat16_products_are_within_the_rounding_of_their_operands(
    made: dict[str, Path],
) -> None:
    wide, narrow = (load_model(made["awq"], dtype, CPU)[1] for dtype in ("float32", "bfloat16"))
    x = torch.randn(3, 192).bfloat16()
    for (_, one), (_, other) in zip(wide.linears(), narrow.linears(), strict=True):
        if one.weight.shape[1] == 192:
            weight = one(torch.eye(192)).T
            error = (other(x).float() - x.float() @ weight.T).abs()
            # Weights and results have 8 significant bits; float32 sums add an error far below 2^-9.
            assert (error <= 3 * 2.0**-9 * (x.float().abs() @ weight.abs().T)).all()


def test_architecture_without_a_native_decoder_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt-neox")
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"quantization_config": FORMS["awq"].config}
    path.write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match="quantized weights are supported for native"):
        check_config(tmp_path)
    with pytest.raises(UnsupportedModel, match="a quantized checkpoint is not supported, because"):
        loading.load(tmp_path, "auto", CPU)
