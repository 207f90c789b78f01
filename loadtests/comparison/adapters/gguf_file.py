"""Converts a Llama or Mixtral checkpoint to a GGUF file for llama.cpp.

If the weights are float16 (form "f16"), Penstock is measured with the same file.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERT = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
Array = np.ndarray[Any, Any]


TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}


def converted(model: Path, name: str) -> Path:
    """Return the path of the checkpoint as a GGUF file of the type `name`, a key of TYPES.

    The file is written on first use.
    """

    def convert(file: Path) -> None:
        _write(model, file, TYPES[name])

    return made(model / f"{name}.gguf", convert)


def made(file: Path, make: Callable[[Path], None]) -> Path:
    """Return `file`, which `make` writes if the file does not exist.

    `make` writes to a temporary name. The file gets its own name when it is complete.
    """
    if not file.exists():
        temporary = file.with_suffix(f".{os.getpid()}")
        try:
            make(temporary)
            temporary.rename(file)
        finally:
            temporary.unlink(missing_ok=True)
    return file


def _write(model: Path, file: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write the checkpoint `model` to `file`.

    `kind` is the GGUF type in which matrices are stored. Vectors and the router of an MoE model are
    stored as F32. The vocabulary has placeholders, because the engines get token ids instead of
    texts.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(file), "llama")
    _describe(writer, config)
    for name, array in _tensors(model, config).items():
        if array.ndim > 1 and "ffn_gate_inp" not in name:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    # llama.cpp ignores the tokens of "no_vocab". Penstock rejects a file without tokens.
    writer.add_token_list([f"<{number}>" for number in range(config["vocab_size"])])
    if experts := config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])


def _tensors(model: Path, config: dict[str, Any]) -> dict[str, Array]:
    """Return all tensors as fp32, by their GGUF names."""
    loaded = {}
    for file in sorted(model.glob("*.safetensors")):
        loaded.update(load_file(file))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors: dict[str, Array] = {}
    experts: dict[str, dict[int, Array]] = {}
    for name, array in loaded.items():
        layer, rest = _layer_of(name.removesuffix(".weight"))
        pieces = rest.split(".")
        if "experts" in pieces:
            target = f"{layer}{_EXPERT[pieces[-1]]}.weight"
            experts.setdefault(target, {})[int(pieces[-2])] = array.astype(np.float32)
            continue
        if pieces[-1] in ("q_proj", "k_proj"):
            array = _interleaved(array, heads if pieces[-1] == "q_proj" else kv_heads)
        tensors[f"{layer}{_NAMES[rest]}.weight"] = np.ascontiguousarray(array, np.float32)
    for name, each in experts.items():
        tensors[name] = np.stack([each[number] for number in range(len(each))])
    if "output.weight" not in tensors:
        tensors["output.weight"] = tensors["token_embd.weight"]
    return tensors


def _layer_of(name: str) -> tuple[str, str]:
    """Split a tensor name into a layer prefix and the rest: ("blk.3.", rest), or ("", name)."""
    if not name.startswith("model.layers."):
        return "", name
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.", rest


def _interleaved(weight: Array, heads: int) -> Array:
    """Reorder each head's rows, because the two engines rotate different pairs of rows (RoPE).

    transformers pairs row i of a head's first half with row i of the second half. llama.cpp pairs
    adjacent rows.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)
