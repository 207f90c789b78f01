"""Write checkpoint folders as GGUF files, with the writer and the tensor names of `gguf`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.support.checkpoints import FAMILIES, make_tokenizer

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}
CONTROL, USER_DEFINED, NORMAL = 3, 4, 1


WIDE = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
"""Sizes of a small model whose rows are multiples of 256 items, as K-quants require."""


def make_gguf(folder: Path, family: str, kind: Callable[[str], str] | str, **sizes: int) -> Path:
    """Write a random model of the sizes `WIDE` to a folder and as GGUF file; return the file.

    Args:
        kind: See `write_gguf`.
        sizes: Entries of the configuration that replace those of `WIDE`.
    """
    config = FAMILIES[family]()
    config.update({**WIDE, **sizes})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return write_gguf(folder, folder.with_suffix(".gguf"), kind)


def write_gguf(
    folder: Path,
    path: Path,
    kind: Callable[[str], str] | str = "F16",
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tokenizer: bool = True,
    **options: Any,
) -> Path:
    """Write the checkpoint in `folder` to the GGUF file `path`; return `path`.

    Args:
        kind: Type of the matrices, or a function of the tensor's name in the file; a K-quant gets
            random blocks. Vectors are F32.
        extra: Adds or replaces metadata.
        options: For `gguf.GGUFWriter`, such as `split_max_tensors`.
    """
    config = json.loads((folder / "config.json").read_text())
    name = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, name, **options)
    _add_config(writer, name, config)
    if tokenizer:
        add_tokenizer(writer, folder)
    extra(writer)
    tensors = load_file(folder / "model.safetensors")
    for stored, items in stored_tensors(name, config, tensors).items():
        wanted = kind if isinstance(kind, str) else kind(stored)
        add_tensor(writer, stored, items, "F32" if items.ndim == 1 else wanted)
    _add_rope_factors(writer, name, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_tensors(
    name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, np.ndarray]:
    """Return the tensors in float32 as a converter writes them, by their names in the file."""
    architecture = {text: arch for arch, text in gguf.MODEL_ARCH_NAMES.items()}[name]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    found = {}
    for own, tensor in tensors.items():
        # gguf has no name for Gemma's head, because Gemma ties the head to the embedding.
        stored = names.get_name(own, try_suffixes=(".weight", ".bias")) or "output.weight"
        assert own == "lm_head.weight" or stored != "output.weight", own
        items = tensor.float().numpy()
        if name == "llama" and ".q_proj." in own:
            items = interleaved(items, config["num_attention_heads"])
        if name == "llama" and ".k_proj." in own:
            items = interleaved(items, config["num_key_value_heads"])
        if name.startswith("gemma") and own.endswith("norm.weight"):
            items = items + np.float32(1)
        found[stored] = items
    return found


def interleaved(items: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head: row i and row i + half become neighbours."""
    shape = items.shape
    halves = items.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(shape))


def add_tensor(writer: gguf.GGUFWriter, name: str, items: np.ndarray, kind: str) -> None:
    """Add a tensor of type `kind`; a K-quant gets random blocks instead of the items."""
    type_ = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16"):
        writer.add_tensor(name, items.astype({"F32": np.float32, "F16": np.float16}[kind]))
        return
    if not kind.endswith("_K"):
        writer.add_tensor(name, gguf.quants.quantize(items, type_), raw_dtype=type_)
        return
    block_items, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    random = np.random.default_rng(len(name))
    shape = items.shape[0], items.shape[1] // block_items, block_bytes
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2))
    for at in places:  # byte offsets of the float16 scales in a block
        numbers = random.uniform(1e-4, 1e-3, shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = numbers[..., None].view(np.uint8)
    writer.add_tensor(name, blocks.reshape(shape[0], -1), raw_dtype=type_)


def _add_config(writer: gguf.GGUFWriter, name: str, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.get("rope_parameters") or {}
    if name == "gemma3":
        writer.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        kinds = [each == "sliding_attention" for each in config["layer_types"]]
        writer.add_sliding_window_pattern(kinds)
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    rotated = head_dim
    if name == "phi3":
        rotated = int(rope.get("partial_rotary_factor", 1.0) * head_dim)
        writer.add_rope_dimension_count(rotated)
        original = config.get("original_max_position_embeddings")
        if original:
            writer.add_rope_scaling_orig_ctx_len(original)
    if name in ("phi3", "gemma2", "gemma3") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_rope_factors(writer: gguf.GGUFWriter, name: str, config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config, rope))


def llama3_factors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> np.ndarray:
    """Return the divisor of each pair's frequency, from the formulas of Llama 3.1."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    found: np.ndarray = (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
    return found


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str = "gpt-2") -> None:
    """Add a byte-level BPE tokenizer and the chat template of a folder."""
    content = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = {**content["model"]["vocab"]}
    kinds = dict.fromkeys(tokens, NORMAL)
    for added in content["added_tokens"]:
        tokens[added["content"]] = added["id"]
        kinds[added["content"]] = CONTROL if added["special"] else USER_DEFINED
    in_order = sorted(tokens, key=lambda text: tokens[text])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(in_order)
    writer.add_token_types([kinds[text] for text in in_order])
    merges = content["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
    ):
        text = settings.get(name)
        text = text["content"] if isinstance(text, dict) else text
        if text:
            add(tokens[text])
    template = folder / "chat_template.jinja"
    source = template.read_text() if template.is_file() else settings.get("chat_template")
    if source:
        writer.add_chat_template(source)
