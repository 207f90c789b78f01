"""Tensor names in checkpoints; the defaults are Llama's."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of tensors, without `.weight`. Names in a layer are relative to `<layers>.<number>`."""

    embeddings: str = "model.embed_tokens"
    embedding_norm: str = ""
    prefix: str = ""  # added to all names if no name of the checkpoint begins with it
    norm: str = "model.norm"
    head: str = "lm_head"
    layers: str = "model.layers"
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"  # complete name: no `.weight` is appended
    query_down: str = "self_attn.q_a_proj"  # used by MLA with a compressed query
    query_norm: str = "self_attn.q_a_layernorm"  # used by MLA with a compressed query
    query_up: str = "self_attn.q_b_proj"  # MLA with a compressed query; otherwise `qkv[0]` is used
    row_down: str = "self_attn.kv_a_proj_with_mqa"  # MLA only
    row_norm: str = "self_attn.kv_a_layernorm"  # MLA only
    row_up: str = "self_attn.kv_b_proj"  # MLA only
    output: str = "self_attn.o_proj"
    mlp: str = "mlp"
    # relative to the name of `mlp` or of the shared expert
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"  # relative to the name of `mlp` or of the shared expert
    experts: str = "mlp"  # prefix of `router`, `router_bias`, `shared` and `shared_gate`
    router: str = "gate"
    router_bias: str = "gate.e_score_correction_bias"  # complete name: no `.weight` is appended
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"
    # relative to <experts>.experts.<number>
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
