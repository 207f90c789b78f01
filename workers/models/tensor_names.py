"""Tensor names in checkpoints; the defaults are Llama's."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names without `.weight`; names of a layer's tensors are relative to `<layers>.<number>`."""

    embeddings: str = "model.embed_tokens"
    embedding_norm: str = ""
    prefix: str = ""  # prefix that a checkpoint may omit from all names
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
    sinks: str = "self_attn.sinks"  # the full name, without `.weight`
    query_down: str = "self_attn.q_a_proj"  # MLA, as are the next five
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"  # if the query is not compressed, `qkv[0]` is used instead
    row_down: str = "self_attn.kv_a_proj_with_mqa"
    row_norm: str = "self_attn.kv_a_layernorm"
    row_up: str = "self_attn.kv_b_proj"
    output: str = "self_attn.o_proj"
    mlp: str = "mlp"  # the next two are relative to this, or to the shared expert
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    experts: str = "mlp"
    router: str = "gate"  # relative to `experts`, as are the next three
    router_bias: str = "gate.e_score_correction_bias"  # the full name, without `.weight`
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")  # in <experts>.experts.<number>
    expert_down: str = "down_proj"
