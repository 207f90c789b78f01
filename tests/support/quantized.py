"""Quantized checkpoints of a small model, made without the code under test.

Each form quantizes float weights by plain rounding and packs the codes with loops over words.
Weights are dequantized from the codes before packing, in float64.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import VOCAB_SIZE, make_tokenizer

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 192, 320, 4, 2, 2

Codes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Quantized:
    """Integer codes [N, K], and the scale and the zero point of each weight, both [N, K]."""

    codes: Codes
    scales: npt.NDArray[np.float64]
    zeros: Codes

    def dequantized(self) -> Tensor:
        return torch.from_numpy((self.codes - self.zeros) * self.scales).float()


@dataclass(frozen=True)
class Form:
    """A published form: its `quantization_config`, and a function that makes a module's tensors."""

    config: dict[str, Any]
    # Returns the stored tensors and the dequantized weight.
    quantize: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def groups_of(weight: Tensor, size: int, order: npt.NDArray[np.int64] | None = None) -> Codes:
    """Return the group of each input; with `order`, the groups of the permuted inputs."""
    inputs = weight.shape[1]
    groups = np.arange(inputs) // (inputs if size < 0 else size)
    return groups if order is None else groups[np.argsort(order)]


def quantize_integers(
    weight: Tensor, bits: int, groups: Codes, symmetric: bool
) -> tuple[Quantized, Tensor, Codes]:
    """Quantize to unsigned codes; return also the float16 scales and zero points [N, G]."""
    values = weight.double().numpy()
    count, top = int(groups.max()) + 1, 2**bits - 1
    scales = torch.zeros(len(values), count, dtype=torch.float16)
    zeros = np.full((len(values), count), 2 ** (bits - 1), np.int64)
    for group in range(count):
        part = values[:, groups == group]
        low, high = part.min(1).clip(max=0), part.max(1).clip(min=0)
        width = 2 * np.maximum(-low, high) if symmetric else high - low
        scales[:, group] = torch.from_numpy(width / top).half()
        if not symmetric:
            zeros[:, group] = np.rint(-low / scales[:, group].double().numpy()).clip(0, top)
    wide = scales.double().numpy()[:, groups]
    codes = (np.rint(values / wide) + zeros[:, groups]).clip(0, top).astype(np.int64)
    return Quantized(codes, wide, zeros[:, groups]), scales, zeros


def packed_words(codes: Codes, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack the last dimension into words of 32 bits; `order[i]` is the column packed at index i."""
    per_word = 32 // bits
    columns = order or tuple(range(per_word))
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per_word)), np.uint32)
    for word in range(words.shape[-1]):
        for at, column in enumerate(columns):
            index = word * per_word + column
            if index < codes.shape[-1]:
                words[..., word] |= codes[..., index].astype(np.uint32) << np.uint32(bits * at)
    return torch.from_numpy(words.view(np.int32))


def gptq(bits: int, size: int, symmetric: bool, act_order: bool, v2: bool = False) -> Form:
    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        order = np.random.default_rng(weight.shape[1]).permutation(weight.shape[1])
        groups = groups_of(weight, size, order if act_order else None)
        found, scales, zeros = quantize_integers(weight, bits, groups, symmetric)
        stored = zeros if v2 else (zeros - 1) % 2**bits
        tensors = {
            "qweight": packed_words(found.codes, bits).T.contiguous(),
            "qzeros": packed_words(stored.T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return tensors, found.dequantized()

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric,
        "desc_act": act_order, "checkpoint_format": "gptq_v2" if v2 else "gptq", "lm_head": False,
    }  # fmt: skip
    return Form(config, quantize)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(size: int) -> Form:
    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        found, scales, zeros = quantize_integers(weight, 4, groups_of(weight, size), False)
        tensors = {
            "qweight": packed_words(found.codes.T, 4, AWQ_ORDER),
            "qzeros": packed_words(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
        return tensors, found.dequantized()

    config = {
        "quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": None,
    }  # fmt: skip
    return Form(config, quantize)


def compressed(weights: dict[str, Any], form: str, inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip


def packed(bits: int, size: int, symmetric: bool, act_order: bool = False) -> Form:
    strategy = "channel" if size < 0 else "group"

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        order = np.random.default_rng(weight.shape[1]).permutation(weight.shape[1])
        groups = groups_of(weight, size, order if act_order else None)
        found, scales, zeros = quantize_integers(weight, bits, groups, symmetric)
        tensors = {
            "weight_packed": packed_words(found.codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed_words(zeros.T, bits).T.contiguous()
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, found.dequantized()

    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
        "group_size": None if size < 0 else size, "dynamic": False,
        "actorder": "group" if act_order else None,
    }  # fmt: skip
    return Form(compressed(weights, "pack-quantized", None), quantize)


INPUT_SCALES = (0.01, 0.02)
"""Static scales of the activations of modules with `HIDDEN` inputs, and of other modules."""


def int8(
    symmetric: bool = True, activations: bool = True, size: int = -1, static: bool = False
) -> Form:
    """Return INT8 with a scale per channel or group. Symmetric codes are in [-127, 127]."""

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if symmetric and size < 0:
            scales = (weight.abs().amax(1, keepdim=True) / 127).float()
            codes = (weight / scales).round().clamp(-127, 127)
            tensors = {"weight": codes.to(torch.int8), "weight_scale": scales}
            if static:
                scale = INPUT_SCALES[weight.shape[1] != HIDDEN]
                tensors["input_scale"] = torch.tensor([scale])
            return tensors, (codes.double() * scales.double()).float()
        groups = groups_of(weight, size)
        found, scales, zeros = quantize_integers(weight, 8, groups, symmetric)
        tensors = {
            "weight": torch.from_numpy((found.codes - 128).astype(np.int8)),
            "weight_scale": scales,
        }
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
        return tensors, found.dequantized()

    weights = {
        "num_bits": 8, "type": "int", "symmetric": symmetric, "dynamic": False,
        "strategy": "channel" if size < 0 else "group", "group_size": None if size < 0 else size,
    }  # fmt: skip
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": not static,
              "strategy": "tensor" if static else "token"}  # fmt: skip
    return Form(compressed(weights, "int-quantized", inputs if activations else None), quantize)


FP8_MAX = 448.0


def _fp8(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize blocks of rows x columns; return codes, scales of blocks and dequantized weights."""
    tall, wide = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    scales = torch.zeros(tall, wide)
    codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    result = torch.zeros(weight.shape)
    for i in range(tall):
        for j in range(wide):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[at].abs().max() / FP8_MAX
            codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            result[at] = (codes[at].double() * scales[i, j].double()).float()
    return codes, scales, result


def fp8_blocks() -> Form:
    """Return DeepSeek V3's form: blocks of 128 x 128, dynamic activations."""

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, result = _fp8(weight, 128, 128)
        return {"weight": codes, "weight_scale_inv": scales}, result

    config = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    return Form(config, quantize)


def fp8(strategy: str, static: bool = False, hugging_face: bool = False) -> Form:
    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = {
            "tensor": weight.shape,
            "channel": (1, weight.shape[1]),
            "block": (128, 128),
        }[strategy]
        codes, scales, result = _fp8(weight, rows, columns)
        if strategy == "tensor":
            scales = scales.view(()) if hugging_face else scales.view(1)
        tensors = {"weight": codes, "weight_scale": scales}
        if static:
            tensors["input_scale"] = torch.tensor([0.02])
        return tensors, result

    if hugging_face:
        scheme = "static" if static else "dynamic"
        return Form({"quant_method": "fp8", "activation_scheme": scheme}, quantize)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy,
               "block_structure": [128, 128] if strategy == "block" else None}  # fmt: skip
    inputs = {"num_bits": 8, "type": "float", "dynamic": not static, "symmetric": True,
              "strategy": "tensor" if static else "token"}  # fmt: skip
    return Form(compressed(weights, "float-quantized", inputs), quantize)


WEIGHT_ONLY: dict[str, Form] = {
    "fp8-blocks": fp8_blocks(),
    "fp8-hugging-face-tensor": fp8("tensor", True, hugging_face=True),
    "fp8-tensor-static": fp8("tensor", static=True),
    "fp8-channel-dynamic": fp8("channel"),
    "fp8-block-dynamic": fp8("block"),
    "int8-channel": int8(activations=False),
    "int8-asymmetric": int8(symmetric=False),
    "int8-groups": int8(activations=False, size=32),
    "packed-4-groups": packed(4, 32, True),
    "packed-4-asymmetric": packed(4, 64, False),
    "packed-4-act-order": packed(4, 32, True, act_order=True),
    "packed-4-asymmetric-act-order": packed(4, 64, False, act_order=True),
    "packed-4-channel": packed(4, -1, True),
    "packed-8-groups": packed(8, 32, True),
    "packed-8-asymmetric": packed(8, 64, False),
    "gptq-4": gptq(4, 32, True, False),
    "gptq-4-asymmetric": gptq(4, 64, False, False),
    "gptq-4-act-order": gptq(4, 32, False, True),
    "gptq-4-one-group": gptq(4, -1, True, False),
    "gptq-4-v2": gptq(4, 64, False, False, v2=True),
    "gptq-8": gptq(8, 32, True, True),
    "gptq-8-asymmetric": gptq(8, 64, False, False),
    "awq": awq(64),
    "awq-32": awq(32),
}
"""Forms whose products are weight-only on every CPU."""

INT8_PRODUCTS = {"int8-products": int8(), "int8-static": int8(static=True)}
FORMS = WEIGHT_ONLY | INT8_PRODUCTS


FLOAT = Form({}, lambda weight: ({"weight": weight}, weight))
"""The form of weights that are not quantized."""


FLOAT_MODULES = ("embed_tokens", "embeddings", "wte", "lm_head", ".gate", "shared_expert_gate")
"""Endings of the names of modules that stay float: embeddings, heads and routers."""


def small() -> dict[str, Any]:
    """Return model sizes that are multiples of 64 but not of 128."""
    return {
        "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 192, "bos_token_id": 0,
        "eos_token_id": 1,
    }  # fmt: skip


KINDS = {"dtype": torch.float32, "experts_implementation": "eager"}
"""Arguments with which `transformers` makes and loads the models."""


def save_float_model(folder: Path, config: Any = None) -> Path:
    """Write a model with random weights and its tokenizer; return the folder.

    Args:
        config: configuration of `transformers`; None: a small Llama.
    """
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config or transformers.LlamaConfig(**small(), tie_word_embeddings=False), **KINDS
    ).eval()
    for name, parameter in model.named_parameters():
        around = 1.0 if "norm" in name else 0.0
        parameter.data.normal_(around, 0.1)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_quantized(
    folder: Path,
    form: Form,
    config: Any = None,
    float_model: Path | None = None,
    quantizes_head: bool = False,
) -> Any:
    """Write a quantized checkpoint; return the `transformers` model of the dequantized weights.

    Args:
        config: configuration of `transformers`; None: a small Llama.
        float_model: folder of `save_float_model` that is quantized instead of a new model.
        quantizes_head: whether the LM head is quantized too.
    """
    if float_model is None:
        save_float_model(folder, config)
    else:
        shutil.copytree(float_model, folder, dirs_exist_ok=True)
    tensors: dict[str, Tensor] = {}
    dequantized = {}
    for name, value in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        is_matrix = name.endswith(".weight") and value.dim() == 2
        is_float = module.endswith(FLOAT_MODULES) and not (quantizes_head and module == "lm_head")
        if not is_matrix or is_float:
            tensors[name] = value
            continue
        stored, dequantized[name] = form.quantize(value)
        tensors |= {f"{module}.{suffix}": each.contiguous() for suffix, each in stored.items()}
    # Load the model from the saved names: `save_pretrained` may have split stacked experts.
    save_file(load_file(folder / "model.safetensors") | dequantized, folder / "model.safetensors")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, **KINDS).eval()
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": form.config}))
    return reference
