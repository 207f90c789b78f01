"""Settings that occur only in DeepSeek's `config.json`: MLA and expert routing."""

from dataclasses import dataclass

from penstock.workers.models.config import Fields


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Sizes of MLA. A cache row of a token is a compressed latent followed by a rotated key."""

    rank: int  # number of features of the latent
    query_rank: int  # number of features of the query's own latent; 0: uncompressed query
    plain_dim: int  # number of features of a head's query and key without rotary embedding
    rope_dim: int  # number of features of a head's query and key with rotary embedding
    value_dim: int  # number of features of a head's value

    @property
    def head_dim(self) -> int:
        """Number of features of a head's query."""
        return self.plain_dim + self.rope_dim

    @property
    def up_dim(self) -> int:
        """Number of features per head of the latent's up-projection: plain key, then value."""
        return self.plain_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """Parameters by which a token's experts are chosen."""

    method: str  # "greedy", "group_limited_greedy" or "noaux_tc"
    scale: float  # factor of the experts' weights
    num_groups: int = 1  # number of groups of experts; 1 for "greedy"
    top_groups: int = 1  # number of groups from which a token's experts are chosen


def read_latent(config: Fields) -> LatentSpec:
    has_query_rank = config.values.get("q_lora_rank") is not None
    if config.values.get("attention_bias") and not has_query_rank:
        raise config.unsupported(
            "attention_bias is true and q_lora_rank is absent: this combination is not supported"
        )
    rope_dim = config.size("qk_rope_head_dim")
    if rope_dim % 2:
        raise config.bad("qk_rope_head_dim", "an even number, which rotary embeddings require")
    return LatentSpec(
        rank=config.size("kv_lora_rank"),
        query_rank=config.size("q_lora_rank") if has_query_rank else 0,
        plain_dim=config.size("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=config.size("v_head_dim"),
    )


def read_routing(
    config: Fields, methods: tuple[str, ...], num_experts: int, top_k: int
) -> RoutingSpec:
    """Read the expert routing; `methods` are the allowed values of `topk_method`, default first."""
    values = config.values
    method = values.get("topk_method") or methods[0]
    if method not in methods:
        known = " or ".join(methods)
        raise config.unsupported(f"topk_method {method!r} is not supported: expected {known}")
    scoring = "sigmoid" if method == "noaux_tc" else "softmax"
    if values.get("scoring_func", scoring) != scoring:
        found = values["scoring_func"]
        raise config.unsupported(
            f"scoring_func {found!r} is not supported with topk_method {method!r}: expected "
            f"{scoring!r}"
        )
    if values.get("moe_layer_freq", 1) != 1:
        found = values["moe_layer_freq"]
        raise config.unsupported(f"moe_layer_freq {found!r:.40} is not supported: expected 1")
    scale = config.number("routed_scaling_factor", 1.0)
    if method == "greedy":
        return RoutingSpec(method, scale)
    num_groups, top_groups = config.size("n_group"), config.size("topk_group")
    size, rest = divmod(num_experts, num_groups)
    if rest or (method == "noaux_tc" and size < 2):
        least = " of 2 experts or more" if method == "noaux_tc" else ""
        raise config.bad(
            "n_group", f"a number that divides the {num_experts} experts into equal groups{least}"
        )
    if top_groups > num_groups or top_groups * size < top_k:
        raise config.bad(
            "topk_group",
            f"{-(-top_k // size)} to {num_groups} (n_group), so that the chosen groups have at "
            f"least num_experts_per_tok ({top_k}) experts",
        )
    return RoutingSpec(method, scale, num_groups, top_groups)
