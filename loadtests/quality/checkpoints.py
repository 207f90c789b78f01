"""Writes quantized checkpoints of a float Llama, in the forms of the quality table."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.kernels.linear.code_tables import NF4
from penstock.kernels.linear.quantize_weights import quantize_weight
from penstock.loadtests.quality.calibration import Inputs
from penstock.loadtests.quality.rounding import (
    GROUP,
    NF4_BLOCK,
    Rounded,
    clipped,
    gptq,
    mxfp4,
    nf4,
    nvfp4,
    q4_k,
    q6_k,
)

WEIGHTS = "model.safetensors"
Tensors = dict[str, Tensor]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ stores the code of column `AWQ_ORDER[i]`, of eight columns, in bits 4 i to 4 i + 3 of a word.
"""

AWQ_STEPS = 20
"""Number of exponents that AWQ tries. An input's scale is its mean magnitude to such a power."""


@dataclass(frozen=True, slots=True)
class Source:
    """A float checkpoint, with statistics of the inputs of its linear layers."""

    folder: Path
    tensors: Tensors
    inputs: Mapping[str, Inputs]  # by the name of the linear layer

    @staticmethod
    def of(folder: Path, inputs: Mapping[str, Inputs]) -> "Source":
        return Source(folder, load_file(folder / WEIGHTS), inputs)

    def write(self, folder: Path, tensors: Tensors, quantization: dict[str, Any] | None) -> Path:
        """Write a copy of the checkpoint with other tensors and a `quantization_config`."""
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns(WEIGHTS))
        config = json.loads((folder / "config.json").read_text())
        if quantization is not None:
            config["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: each.contiguous() for name, each in tensors.items()}, folder / WEIGHTS)
        return folder


def write_gptq(source: Source, folder: Path) -> Path:
    """Write a checkpoint in GPTQ form: 4 bits in groups of 128, asymmetric, without act-order."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False,
              "desc_act": False, "checkpoint_format": "gptq_v2"}  # fmt: skip
    tensors = dict(source.tensors)
    for module, inputs in source.inputs.items():
        found = gptq(tensors.pop(f"{module}.weight"), inputs.hessian)
        tensors |= {
            f"{module}.qweight": _words(found.codes).T,
            f"{module}.qzeros": _words(found.zeros.T),
            f"{module}.scales": found.scales.T.half(),
            f"{module}.g_idx": torch.arange(found.codes.shape[1], dtype=torch.int32) // GROUP,
        }
    return source.write(folder, tensors, config)


def write_awq(source: Source, folder: Path) -> Path:
    """Write a checkpoint in AWQ form.

    The weights have 4 bits in groups of 128, with scaled inputs and clipped ranges.
    """
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
              "version": "gemm"}  # fmt: skip
    tensors, scales = dict(source.tensors), {}
    for before, modules in _awq_pairs(source):
        factors = _awq_factors([tensors[f"{each}.weight"] for each in modules],
                               source.inputs[modules[0]])  # fmt: skip
        weight = tensors[f"{before}.weight"]
        tensors[f"{before}.weight"] = weight / (factors if weight.dim() == 1 else factors[:, None])
        for module in modules:
            tensors[f"{module}.weight"] = tensors[f"{module}.weight"] * factors
            scales[module] = factors
    for module, inputs in source.inputs.items():
        cost = inputs.hessian.diagonal()
        if module in scales:
            cost = cost / scales[module].square()
        found = clipped(tensors.pop(f"{module}.weight"), cost)
        tensors |= {
            f"{module}.qweight": _words(found.codes.T, AWQ_ORDER),
            f"{module}.qzeros": _words(found.zeros.T, AWQ_ORDER),
            f"{module}.scales": found.scales.T.half(),
        }
    return source.write(folder, tensors, config)


def _awq_pairs(source: Source) -> list[tuple[str, list[str]]]:
    """Return pairs of a module and the linear layers that read its output.

    AWQ divides the module's weight by the factors of the layers' inputs, and multiplies the weights
    of the layers by these factors. The result of the model does not change.
    """
    layers = sorted({module.rsplit(".", 2)[0] for module in source.inputs})
    pairs = []
    for layer in layers:
        qkv = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
        pairs.append((f"{layer}.input_layernorm", qkv))
        both = [f"{layer}.mlp.{name}_proj" for name in ("gate", "up")]
        pairs.append((f"{layer}.post_attention_layernorm", both))
        pairs.append((f"{layer}.mlp.up_proj", [f"{layer}.mlp.down_proj"]))
    return pairs


def _awq_factors(weights: list[Tensor], inputs: Inputs) -> Tensor:
    """Return the factors [K] of the inputs for which rounding changes the layers' outputs least."""
    magnitudes, whole = inputs.magnitudes.clamp_min(1e-4), torch.cat(weights)
    best, found = torch.inf, torch.ones_like(magnitudes)
    for step in range(AWQ_STEPS):
        factors = magnitudes ** (step / AWQ_STEPS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        cost = inputs.hessian.diagonal() / factors.square()
        error = clipped(whole * factors, cost).weight / factors - whole
        loss = float(((error @ inputs.hessian.float()) * error).sum())
        if loss < best:
            best, found = loss, factors
    return found


def write_nf4(source: Source, folder: Path) -> Path:
    """Write a checkpoint in the NF4 form of bitsandbytes, in blocks of 64."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
              "bnb_4bit_use_double_quant": False}  # fmt: skip
    tensors = dict(source.tensors)
    for module in source.inputs:
        weight = tensors.pop(f"{module}.weight")
        found = nf4(weight)
        flat = found.codes.flatten().to(torch.uint8)
        state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": "float32",
                 "shape": list(weight.shape)}  # fmt: skip
        tensors |= {
            f"{module}.weight": ((flat[0::2] << 4) | flat[1::2])[:, None],
            f"{module}.weight.absmax": found.scales,
            f"{module}.weight.quant_map": torch.tensor(NF4),
            f"{module}.weight.quant_state.bitsandbytes__nf4": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
    return source.write(folder, tensors, config)


def write_w8a16(source: Source, folder: Path) -> Path:
    """Write a checkpoint with INT8 weights and one scale per channel; activations stay float."""

    def stored(weight: Tensor) -> Tensors:
        matrix = quantize_weight(weight, "int8")
        return {"weight": (matrix.codes ^ 128).view(torch.int8), "weight_scale": matrix.scales}

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True,
               "dynamic": False}  # fmt: skip
    return _write_compressed(source, folder, "int-quantized", weights, stored)


def write_mxfp4(source: Source, folder: Path) -> Path:
    """Write a checkpoint in MXFP4 form: blocks of 32 with exponents as scales."""

    def stored(weight: Tensor) -> Tensors:
        found = mxfp4(weight)
        return {"weight_packed": _pairs(found.codes), "weight_scale": found.scales}

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
               "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8"}  # fmt: skip
    return _write_compressed(source, folder, "mxfp4-pack-quantized", weights, stored)


def write_nvfp4(source: Source, folder: Path) -> Path:
    """Write a checkpoint in NVFP4 form: blocks of 16, and one scale for the matrix."""

    def stored(weight: Tensor) -> Tensors:
        found = nvfp4(weight)
        return {
            "weight_packed": _pairs(found.codes),
            "weight_scale": found.scales,
            "weight_global_scale": 1 / found.zeros,
        }

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
               "symmetric": True, "dynamic": False,
               "scale_dtype": "torch.float8_e4m3fn"}  # fmt: skip
    return _write_compressed(source, folder, "nvfp4-pack-quantized", weights, stored)


def _write_compressed(
    source: Source,
    folder: Path,
    form: str,
    weights: dict[str, Any],
    stored: Callable[[Tensor], Tensors],
) -> Path:
    """Write a checkpoint in a form of compressed-tensors, with float activations."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
              "config_groups": {"group_0": group}, "quantization_status": "compressed"}  # fmt: skip
    tensors = dict(source.tensors)
    for module in source.inputs:
        found = stored(tensors.pop(f"{module}.weight"))
        tensors |= {f"{module}.{name}": each for name, each in found.items()}
    return source.write(folder, tensors, config)


def _pairs(codes: Tensor) -> Tensor:
    """Pack pairs of 4-bit codes into bytes, the first code in the lower bits."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)


def k_quant_writer(round_matrix: Callable[[Tensor], Rounded]) -> Callable[[Source, Path], Path]:
    """Return a function that writes a float checkpoint with the weights of a dequantized GGUF file.

    The embeddings are rounded to Q6_K, as in files of llama.cpp. The LM head shares them.
    """

    def write(source: Source, folder: Path) -> Path:
        changed = {
            f"{module}.weight": round_matrix(source.tensors[f"{module}.weight"]).weight
            for module in source.inputs
        }
        embeddings = "model.embed_tokens.weight"
        changed[embeddings] = q6_k(source.tensors[embeddings]).weight
        return source.write(folder, source.tensors | changed, None)

    return write


write_q4_k, write_q6_k = k_quant_writer(q4_k), k_quant_writer(q6_k)


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack every eight 4-bit codes of the last dimension into one word of 32 bits."""
    each = codes.to(torch.int64).reshape(len(codes), -1, 8)
    words = torch.zeros(each.shape[:2], dtype=torch.int64)
    for position, column in enumerate(order):
        words |= each[:, :, column] << 4 * position
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
