"""`quantization_config`: schemes of modules, ignored modules, and errors that name the method."""

from pathlib import Path
from typing import Any

import pytest

from penstock.workers.models.config import BadCheckpoint, Fields, UnsupportedModel
from penstock.workers.models.quantization import read_quantization
from penstock.workers.models.weight_scheme import QuantizationSpec

WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
       "bnb_4bit_use_double_quant": True}  # fmt: skip


def compressed(weights: dict[str, Any] = WEIGHTS, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    form = "pack-quantized" if weights["num_bits"] == 4 else "float-quantized"
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed", **changes,
    }  # fmt: skip


def read(value: Any) -> QuantizationSpec | None:
    return read_quantization(Fields({"quantization_config": value}, Path("config.json")))


def name_of(value: Any, module: str = "model.layers.0.mlp.up_proj") -> str:
    found = read(value)
    assert found is not None
    scheme = found.scheme_of(module)
    return "" if scheme is None else scheme.name


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (FP8, "fp8 blocks of 128 x 128"),
        (FP8 | {"scale_fmt": "ue8m0"}, "fp8 blocks of 128 x 128"),
        (
            FP8 | {"weight_block_size": None, "activation_scheme": "static"},
            "fp8 per tensor, static activations",
        ),
        (compressed(), "fp8 per channel"),
        (compressed(WEIGHTS | {"strategy": "tensor"}), "fp8 per tensor"),
        (compressed(WEIGHTS | {"type": "int"}, format="int-quantized"), "int8 int8 per channel"),
        (compressed(INT4), "packed int4 groups of 128"),
        (compressed(quantization_status="frozen"), "fp8 per channel"),
        (compressed(INT4 | {"actorder": "group"}), "packed int4 groups of 128, act-order"),
        (GPTQ, "gptq int4 groups of 128"),
        (GPTQ | {"bits": 8, "group_size": -1}, "gptq int8 per channel"),
        (GPTQ | {"desc_act": True}, "gptq int4 groups of 128, act-order"),
        (AWQ, "awq int4 groups of 128"),
        (MODELOPT, "modelopt nvfp4 groups of 16"),
        (MODELOPT | {"quant_algo": "FP8"}, "fp8 per tensor, static activations"),
        (BNB, "bitsandbytes nf4 groups of 64, double quantization"),
        (
            BNB | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
            "bitsandbytes fp4 groups of 64",
        ),
        (BNB | {"load_in_4bit": False, "load_in_8bit": True}, "bitsandbytes int8 per channel"),
    ],
)
def test_scheme_has_a_name(config: dict[str, Any], name: str) -> None:
    assert name_of(config) == name


def test_checkpoint_without_quantization_config_has_no_spec() -> None:
    assert read(None) is None
    assert read({}) is None


@pytest.mark.parametrize(
    ("config", "ignored", "quantized"),
    [
        (FP8 | {"modules_to_not_convert": ["mlp.gate"]}, "a.mlp.gate", "a.mlp.gate_proj"),
        (FP8 | {"ignored_layers": ["a.q_proj"]}, "a.q_proj", "b.q_proj"),
        (AWQ | {"modules_to_not_convert": ["visual"]}, "visual.0.proj", "a.visuals"),
        (compressed(ignore=["re:.*gate$"]), "a.mlp.gate", "a.mlp.gate_proj"),
        (compressed(ignore=["lm_head"]), "lm_head", "a.lm_head"),
    ],
)
def test_ignored_modules_are_not_quantized(
    config: dict[str, Any], ignored: str, quantized: str
) -> None:
    assert name_of(config, ignored) == ""
    assert name_of(config, quantized) != ""


def test_groups_with_names_precede_the_group_of_all_linears() -> None:
    named = {"targets": ["re:.*down_proj"], "weights": INT4, "format": "pack-quantized"}
    every = {"targets": ["Linear"], "weights": WEIGHTS}
    config = compressed(config_groups={"a": every, "b": named})
    assert name_of(config, "a.down_proj") == "packed int4 groups of 128"
    assert name_of(config, "a.up_proj") == "fp8 per channel"
    only_down = compressed(config_groups={"b": named})
    assert name_of(only_down, "a.up_proj") == ""


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "squeezellm"},
            "squeezellm are not supported, because.*pickles.*compressed-tensors, fp8",
        ),
        ({"quant_method": "quip"}, "by quip are not supported: .*compressed-tensors, fp8"),
        ({"bits": 4}, "an unnamed method are not supported"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported: expected 'e4m3'"),
        (FP8 | {"scale_fmt": "e4m3"}, "scale_fmt 'e4m3'"),
        (
            FP8 | {"weight_block_size": [128]},
            r"weight_block_size \[128\].*two whole numbers from 1 to 65536",
        ),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size"),
        (FP8 | {"modules_to_not_convert": "all"}, "modules_to_not_convert 'all'.*a list"),
        (GPTQ | {"bits": 3}, "bits 3 is not supported: expected 4 or 8"),
        (GPTQ | {"bits": True}, "bits True"),
        (GPTQ | {"group_size": 0}, "group_size 0"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported: expected 'gemm'"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (
            compressed(format="nvfp4-pack-quantized"),
            "weights: num_bits 8 is not supported: expected 4",
        ),
        (compressed(format="mxfp6-pack-quantized"), "format 'mxfp6-pack-quantized'"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        (BNB | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16'"),
        (compressed(quantization_status="calibration"), "quantization_status 'calibration'"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: format"),
        (compressed(transform_config={"config_groups": {}}), "transform_config"),
        (compressed(config_groups={}), "config_groups"),
        (compressed(WEIGHTS | {"num_bits": 6}), "config_groups, group_0, weights: num_bits 6"),
        (compressed(WEIGHTS | {"strategy": "tensor_group"}), "strategy 'tensor_group'"),
        (compressed(WEIGHTS | {"symmetric": False}), "symmetric False is not supported.*FP8"),
        (compressed(ignore=["re:("]), "ignore.*valid regular expressions"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as error:
        read(config)
    assert "\n" not in str(error.value)


def test_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match="quantization_config is 'int4': expected an object"):
        read("int4")
