"""Chooses how many prompt tokens are enough for a CPU step, so that prompts wait less.

A step of few prompt tokens wastes time: it reads all weights, and Python code prepares it. From
some number of tokens on, the products limit the speed, and a larger step computes no more tokens
per second. If such a step also computes a second prompt, the first prompt's answer begins later
without any gain.
"""

from penstock.kernels.cpu_common.cpu_features import has_amx
from penstock.workers.models.spec import ModelSpec

MIN_TOKENS = 128
"""Number of rows from which a product with AVX2 or AVX-512 is about as fast as with more rows."""

PRODUCTS_PER_THREAD = 7.5e9
"""Multiply-adds of a step, per thread, beside which its other costs are small (about 60 ms)."""


def enough_prompt_tokens(spec: ModelSpec, num_threads: int) -> int:
    """Return after how many prompt tokens a CPU step begins no further prompt; 0 means no limit.

    There is no limit on CPUs with AMX, whose products are so fast that reading the weights still
    takes much of the time of a step of several hundred tokens.

    Args:
        spec: description of the model.
        num_threads: number of threads of all ranks of the worker.
    """
    if has_amx():
        return 0
    enough = max(MIN_TOKENS, PRODUCTS_PER_THREAD * num_threads / _products_per_token(spec))
    if spec.experts is not None:  # the tokens are divided among the experts
        enough *= spec.experts.num_experts / spec.experts.top_k
    return int(enough)


def _products_per_token(spec: ModelSpec) -> int:
    """Return about how many multiply-adds the layers need per token, without attention scores."""
    heads, matrices = spec.num_heads + spec.num_kv_heads, 3 if spec.gated else 2
    inner, experts = spec.intermediate_size, spec.experts
    if experts is not None:
        inner = experts.top_k * experts.inner_size + experts.shared_size
    per_layer = 2 * heads * spec.head_dim * spec.hidden_size
    return spec.num_layers * (per_layer + matrices * spec.hidden_size * inner)
