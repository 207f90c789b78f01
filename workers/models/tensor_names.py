"""What the tensors of a checkpoint are called: a family differs from Llama where it says so."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names without `.weight`; what is under `layers` is relative to `<layers>.<number>`."""

    embeddings: str = "model.embed_tokens"
    embedding_norm: str = ""
    prefix: str = ""  # what a checkpoint may leave out of all names
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
    sinks: str = "self_attn.sinks"  # the whole name
    query_down: str = "self_attn.q_a_proj"  # this and the next four: latent attention
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"  # without it the first of `qkv` makes the query
    row_down: str = "self_attn.kv_a_proj_with_mqa"
    row_norm: str = "self_attn.kv_a_layernorm"
    row_up: str = "self_attn.kv_b_proj"
    output: str = "self_attn.o_proj"
    mlp: str = "mlp"  # what follows is relative to this, or to an expert
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    experts: str = "mlp"
    router: str = "gate"  # this and what follows: relative to `experts`
    router_bias: str = "gate.e_score_correction_bias"  # the whole name
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
