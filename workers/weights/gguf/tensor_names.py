"""Maps the tensor names of GGUF files to those of safetensors checkpoints."""

from collections.abc import Iterator, Mapping

from penstock.common.gguf.config import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from penstock.workers.models.spec import ModelSpec

NOT_WEIGHTS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Names of tensors with rope factors, which are read as part of the configuration."""


def checkpoint_names(spec: ModelSpec) -> dict[str, str]:
    """Return a dict from the tensor names of a GGUF file to those of a safetensors checkpoint.

    A head that is tied to the embeddings is left out.
    """
    names = spec.names
    found = {
        "token_embd.weight": f"{names.embeddings}.weight",
        "output_norm.weight": f"{names.norm}.weight",
    }
    if not spec.tie_embeddings:
        found["output.weight"] = f"{names.head}.weight"
    in_layer = dict(_layer_names(spec))
    for layer in range(spec.num_layers):
        for stored, name in in_layer.items():
            found[f"blk.{layer}.{stored}"] = f"{names.layers}.{layer}.{name}"
    return found


def _layer_names(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    names = spec.names
    if len(names.qkv) == 1:
        yield from _linear("attn_qkv", names.qkv[0], spec.qkv_bias)
    else:
        for stored, name in zip(("attn_q", "attn_k", "attn_v"), names.qkv, strict=True):
            yield from _linear(stored, name, spec.qkv_bias)
    yield from _linear("attn_output", names.output, spec.output_bias)
    gate_up = ("ffn_up",) if len(names.gate_up) == 1 else ("ffn_gate", "ffn_up")
    for stored, name in zip(gate_up, names.gate_up, strict=True):
        yield from _linear(stored, f"{names.mlp}.{name}", spec.mlp_bias)
    yield from _linear("ffn_down", f"{names.mlp}.{names.down}", spec.mlp_bias)
    norms: Mapping[str, str] = {
        "attn_norm": names.attention_norm,
        "post_attention_norm": names.attention_post_norm,
        "ffn_norm": names.mlp_norm,
        "post_ffw_norm": names.mlp_post_norm,
    }
    if spec.qk_norm:
        norms = {**norms, "attn_q_norm": names.q_norm, "attn_k_norm": names.k_norm}
    for stored, name in norms.items():
        if name:
            yield f"{stored}.weight", f"{name}.weight"


def _linear(stored: str, name: str, has_bias: bool) -> Iterator[tuple[str, str]]:
    yield f"{stored}.weight", f"{name}.weight"
    if has_bias:
        yield f"{stored}.bias", f"{name}.bias"
