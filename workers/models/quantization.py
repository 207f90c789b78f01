"""Reads `quantization_config` of a `config.json`: how the checkpoint's weights are quantized.

Needs no torch. Sources of the formats: the configuration classes of `transformers`
(`FineGrainedFP8Config`, `GPTQConfig`, `AwqConfig`, `BitsAndBytesConfig`) and of
`compressed-tensors` (`QuantizationConfig`), and checkpoints of these libraries and of ModelOpt.
"""

import re
from collections.abc import Mapping
from typing import Any

from penstock.workers.models.config import Config, Fields, UnsupportedModel
from penstock.workers.models.weight_scheme import (
    INPUT_SCALES,
    PER_OUTPUT,
    QuantizationSpec,
    Rule,
    Storage,
    WeightScheme,
)


def read_quantization(config: Fields) -> QuantizationSpec | None:
    """Read `quantization_config`; return None if the checkpoint is not quantized.

    Raises:
        UnsupportedModel: The method or one of its options is not supported.
        BadCheckpoint: A value is invalid.
    """
    keys = ("quantization_config", "compression_config")
    key = next((key for key in keys if config.values.get(key)), keys[0])
    found = config.values.get(key)
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise config.bad(key, "an object")
    method = str(found.get("quant_method", ""))
    reader = _READERS.get(method)
    if method == "squeezellm":
        raise config.unsupported(
            "weights quantized by squeezellm are not supported, because its checkpoints are "
            "pickles, which can run code when they are loaded: use a checkpoint in one of "
            f"{', '.join(_READERS)}, or in bfloat16"
        )
    if reader is None:
        raise config.unsupported(
            f"weights quantized by {method or 'an unnamed method'} are not supported: use a "
            f"checkpoint in one of {', '.join(_READERS)}, or in bfloat16"
        )
    return reader(_Options(config, found, method))


class _Options:
    """Options of a `quantization_config`, or of an object inside it; errors name the option."""

    def __init__(self, config: Fields, values: Config, path: str) -> None:
        self._config = config
        self.values = values
        self.path = path

    def refuse(self, key: str, served: str) -> UnsupportedModel:
        return self._config.unsupported(
            f"quantization_config of {self.path}: {key} {self.values.get(key)!r:.80} is not "
            f"supported: expected {served}"
        )

    def architecture(self, served: str) -> None:
        """Raise UnsupportedModel unless the checkpoint has the architecture `served`."""
        found = self._config.values["architectures"][0]
        if found != served:
            raise self._config.unsupported(
                f"weights quantized by {self.path} are supported for {served} only, not for {found}"
            )

    def only(self, key: str, *served: Any) -> Any:
        """Return `key`'s value, default `served[0]`; raise UnsupportedModel if not in `served`."""
        value = self.values.get(key, served[0])
        # Compare the types too, because True == 1 and False == 0 in Python.
        if not any(value == each and type(value) is type(each) for each in served):
            raise self.refuse(key, " or ".join(map(repr, served)))
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return the value at `key`, a positive integer or -1."""
        value = self.values.get(key, default)
        if type(value) is not int or not (value == -1 or 0 < value <= 1 << 16):
            raise self.refuse(key, f"a whole number from 1 to {1 << 16}, or -1")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        found = self.values.get(key) or []
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.refuse(key, "a list of module names")
        for each in found:
            try:
                re.compile(each.removeprefix("re:") if each.startswith("re:") else "")
            except re.error:
                raise self.refuse(key, "names and valid regular expressions") from None
        return tuple(found)

    def inner(self, key: str) -> "_Options | None":
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(key, "an object")
        return _Options(self._config, value, f"{self.path}, {key}")


def _for_all(options: _Options, scheme: WeightScheme, ignore: str) -> QuantizationSpec:
    rules = (Rule(("Linear",), scheme),)
    return QuantizationSpec(options.path, rules, options.names(ignore), by_component=True)


def _read_fp8(options: _Options) -> QuantizationSpec:
    """Read FP8 with scales per block (DeepSeek V3, `weight_scale_inv`) or per module."""
    options.only("fmt", "e4m3", "float8_e4m3fn")
    # "ue8m0" scales are powers of two; DeepSeek V3.1 stores them in float32.
    options.only("scale_fmt", "float", "ue8m0", None)
    options.only("expert_dtype", "fp8", None)
    is_static = options.only("activation_scheme", "dynamic", "static") == "static"
    options.only("modules_to_convert", None)
    ignore = "modules_to_not_convert"
    if options.values.get(ignore) is None and "ignored_layers" in options.values:
        ignore = "ignored_layers"
    input_scale = INPUT_SCALES[0] if is_static else ""
    block = options.values.get("weight_block_size")
    if block is None:
        scheme = WeightScheme(
            "fp8", 8, per_tensor=True, activations="fp8", input_scale=input_scale
        )  # fmt: skip
        return _for_all(options, scheme, ignore)
    rows, columns = _block(options, "weight_block_size")
    scheme = WeightScheme(
        "fp8", 8, columns, rows, scale_name="weight_scale_inv", activations="fp8",
        input_scale=input_scale,
    )  # fmt: skip
    return _for_all(options, scheme, ignore)


def _block(options: _Options, key: str) -> tuple[int, int]:
    block = options.values.get(key)
    expected = "two whole numbers from 1 to 65536"
    if not isinstance(block, list) or len(block) != 2:
        raise options.refuse(key, expected)
    if not all(type(size) is int and 0 < size <= 1 << 16 for size in block):
        raise options.refuse(key, expected)
    return block[0], block[1]


def _read_gptq(options: _Options) -> QuantizationSpec:
    bits = options.only("bits", 4, 8)
    form = options.only("checkpoint_format", "gptq", "gptq_v2")
    options.only("pack_dtype", "int32")
    if options.values.get("dynamic"):
        raise options.refuse("dynamic", "the same settings for all modules")
    options.only("is_marlin_format", False)
    scheme = WeightScheme(
        "gptq",
        bits,
        options.size("group_size", 128),
        symmetric=options.only("sym", True, False),
        act_order=options.only("desc_act", False, True),
        zero_offset=0 if form == "gptq_v2" else 1,
    )
    return _for_all(options, scheme, "modules_to_not_convert")


def _read_awq(options: _Options) -> QuantizationSpec:
    for key in ("bits", "w_bit"):
        options.only(key, 4)
    for key in ("version", "format"):
        if str(options.values.get(key, "gemm")).lower() != "gemm":
            raise options.refuse(key, "'gemm'")
    options.only("zero_point", True)
    size = options.size("group_size", options.values.get("q_group_size", 128))
    scheme = WeightScheme("awq", 4, size, symmetric=False)
    return _for_all(options, scheme, "modules_to_not_convert")


def _read_bitsandbytes(options: _Options) -> QuantizationSpec:
    """Read LLM.int8, NF4 or FP4.

    The outlier threshold of LLM.int8 is ignored, because activations are not quantized here.
    """
    ignore = "llm_int8_skip_modules"
    if options.only("load_in_8bit", False, True):
        options.only("load_in_4bit", False)
        options.only("llm_int8_has_fp16_weight", False)
        return _for_all(options, WeightScheme("bitsandbytes int8", 8), ignore)
    options.only("load_in_4bit", True)
    options.only("bnb_4bit_quant_storage", "uint8", None)
    table = options.only("bnb_4bit_quant_type", "fp4", "nf4")
    nested = options.only("bnb_4bit_use_double_quant", False, True)
    scheme = WeightScheme("bitsandbytes 4 bits", 4, 64, table=table, nested=nested)
    return _for_all(options, scheme, ignore)


def _read_modelopt(options: _Options) -> QuantizationSpec:
    options.only("quant_method", "modelopt", "modelopt_fp4")
    ignore = "exclude_modules" if "exclude_modules" in options.values else "ignore"
    if options.only("quant_algo", "NVFP4", "FP8") == "FP8":
        scheme = WeightScheme(
            "fp8", 8, per_tensor=True, activations="fp8", input_scale=INPUT_SCALES[0]
        )  # fmt: skip
    else:
        options.only("group_size", 16, None)
        scheme = WeightScheme("modelopt nvfp4", 4, 16, activations="fp4")
    return _for_all(options, scheme, ignore)


def _read_mxfp4(options: _Options) -> QuantizationSpec:
    """Read MXFP4 of gpt-oss: only expert stacks are quantized; see `weights/mxfp4_stacks.py`."""
    options.architecture("GptOssForCausalLM")
    rules = (Rule((r"re:.*\.experts\.(gate_up|down)_proj$",), WeightScheme("mxfp4", 4, 32)),)
    ignore = options.names("modules_to_not_convert")
    return QuantizationSpec(options.path, rules, ignore, by_component=True)


_FLOATS_OF_4_BITS: dict[str, tuple[Storage, int, str]] = {
    "mxfp4-pack-quantized": ("mxfp4", 32, "group"),
    "nvfp4-pack-quantized": ("nvfp4", 16, "tensor_group"),
}
"""Storage, group size and strategy of each format, by the name of the format."""

_FORMATS = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
    *_FLOATS_OF_4_BITS,
)


def _read_compressed_tensors(options: _Options) -> QuantizationSpec:
    # Older versions of compressed-tensors also write "frozen" if the weights are compressed.
    options.only("quantization_status", "compressed", "frozen", None)
    sparsity = options.inner("sparsity_config")
    if sparsity is not None:
        sparsity.only("format", "dense", None)
    if options.values.get("transform_config"):
        raise options.refuse("transform_config", "none")
    groups = options.inner("config_groups")
    if groups is None or not groups.values:
        raise options.refuse("config_groups", "an object with at least one group")
    rules = []
    for name in groups.values:
        group = groups.inner(name)
        if group is None:
            raise groups.refuse(name, "an object")
        stored = group if group.values.get("format") is not None else options
        targets = group.names("targets") or ("Linear",)
        rules.append(Rule(targets, _read_group(group, stored.only("format", *_FORMATS))))
    return QuantizationSpec(options.path, tuple(rules), options.names("ignore"), by_component=False)


def _read_group(group: _Options, form: str) -> WeightScheme:
    """Read the scheme of one entry of `config_groups`."""
    weights = group.inner("weights")
    if weights is None:
        raise group.refuse("weights", "an object")
    group.only("output_activations", None)
    if form in _FLOATS_OF_4_BITS:
        return _read_float_of_4_bits(group, weights, form)
    kind, bits = weights.only("type", "int", "float"), weights.only("num_bits", 8, 4)
    weights.only("dynamic", False)
    symmetric = weights.only("symmetric", True, False)
    strategy = weights.only("strategy", "channel", "tensor", "group", "block")
    order = weights.only("actorder", None, "group", "weight", "static", "dynamic", False, True)
    storage: Storage = (
        "fp8" if kind == "float" else "packed" if form == "pack-quantized" else "int8"
    )
    if bits == 4 and storage != "packed":
        raise weights.refuse("num_bits", "8, or 4 in the format 'pack-quantized'")
    if storage == "fp8" and not symmetric:
        raise weights.refuse("symmetric", "True for FP8")
    size, rows = PER_OUTPUT, 1
    if strategy == "group":
        size = weights.size("group_size")
    elif strategy == "block":
        rows, size = _block(weights, "block_structure")
    return WeightScheme(
        storage,
        bits,
        size,
        rows,
        per_tensor=strategy == "tensor",
        symmetric=symmetric,
        act_order=order in ("group", "dynamic", True),
        activations=_activations(group),
        input_scale=INPUT_SCALES[0] if bits == 8 and _has_static_scale(group) else "",
    )


def _has_static_scale(group: _Options) -> bool:
    """Return whether the checkpoint has one static scale for the activations of each module.

    Return False if the scales have zero points, or if each scale covers only some activations.
    """
    given = group.inner("input_activations")
    if given is None or _activations(group) not in ("int8", "fp8"):
        return False
    is_dynamic = given.only("dynamic", False, True, "local")
    symmetric, strategy = given.values.get("symmetric", True), given.values.get("strategy")
    is_whole = strategy == "tensor" or (strategy is None and given.values.get("group_size") is None)
    return not is_dynamic and symmetric is True and is_whole


def _read_float_of_4_bits(group: _Options, weights: _Options, form: str) -> WeightScheme:
    storage, size, strategy = _FLOATS_OF_4_BITS[form]
    served: dict[str, Any] = {
        "type": "float", "num_bits": 4, "group_size": size, "strategy": strategy,
        "symmetric": True, "dynamic": False,
    }  # fmt: skip
    for key, value in served.items():
        weights.only(key, value)
    return WeightScheme(storage, 4, size, activations=_activations(group))


def _activations(group: _Options) -> str:
    given = group.inner("input_activations")
    if given is None:
        return ""
    if given.only("num_bits", 8, 4) == 4:
        given.only("type", "float")
        return "fp4"
    return {"float": "fp8", "int": "int8"}[given.only("type", "int", "float")]


_READERS = {
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "bitsandbytes": _read_bitsandbytes,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "mxfp4": _read_mxfp4,
}
