"""Cases of the smoke section: each computes one operation, and its exact result in float64.

The cases of a group run in one process. Inputs are random, and their sizes are not multiples of
tiles. The exact results are computed on the host from the same (rounded) inputs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.activation.op import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_reference,
    silu_and_mul,
    silu_and_mul_reference,
    swiglu_oai,
    swiglu_oai_reference,
)
from penstock.kernels.attention.op import (
    paged_attention,
    paged_attention_reference,
    plan_attention,
)
from penstock.kernels.attention.score_mod import PLAIN, ScoreMod
from penstock.kernels.kv_cache.block_copy import gather_blocks, scatter_blocks
from penstock.kernels.kv_cache.checksum import checksum, checksum_reference
from penstock.kernels.kv_cache.format import FORMATS, dequantize, to_cache
from penstock.kernels.linear.batch_invariant import (
    batch_invariant_bmm,
    batch_invariant_bmm_reference,
    batch_invariant_matmul,
    batch_invariant_matmul_reference,
)
from penstock.kernels.linear.code_kinds import FP8_GROUP_INPUTS
from penstock.kernels.linear.quantized import (
    Kind,
    QuantizedMatrix,
    even_groups,
    has_zeros,
    is_narrow,
    pack_quantized,
)
from penstock.kernels.linear.w8a8 import (
    Form,
    W8A8Linear,
    has_w8a8_products,
    quantize_activations_reference,
    w8a8_matmul_reference,
)
from penstock.kernels.mla.op import mla_attention, mla_attention_reference, plan_mla
from penstock.kernels.moe.op import (
    ExpertWeights,
    GatedActivation,
    grouped_moe_forward,
    grouped_moe_forward_reference,
)
from penstock.kernels.norm.op import (
    gemma_rms_norm,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from penstock.kernels.rope.op import rotary_table, rotate_, rotate_reference
from penstock.loadtests.gpu.smoke_inputs import BLOCK_SIZE, Case, Inputs, Result, wide
from penstock.loadtests.gpu.smoke_sampling import sampling

DECODES = [(1, 1), (1, 700), (1, 513), (1, 64), (1, 1025)]
MIXED = [(1, 1), (150, 300), (1, 600), (9, 9), (2, 530)]
SHORT_DECODES, SHORT_MIXED = [(1, 1), (1, 70)], [(1, 33), (20, 40)]


def attention(inputs: Inputs) -> Iterator[Case]:
    """Yield cases of paged attention (decode and mixed steps), in the shapes of common models."""
    decodes, mixed = (SHORT_DECODES, SHORT_MIXED) if inputs.small else (DECODES, MIXED)
    eight, few = (1, 4, 64) if inputs.small else (8, 4, 128), (1, 2, 64)
    yield "decode, 8 x 4 heads of 128", lambda: _attend(inputs, decodes, eight)
    yield "mixed, 8 x 4 heads of 128", lambda: _attend(inputs, mixed, eight)
    sinks = ScoreMod(sinks=inputs.randn(2).float(), cap=30.0)
    yield "window, sinks and cap, heads of 64", lambda: _attend(inputs, mixed, few, 37, sinks)
    slopes = ScoreMod(slopes=inputs.randn(2).float().abs() / 8)
    yield "slopes, heads of 64", lambda: _attend(inputs, mixed, few, 0, slopes)
    yield "heads of 256", lambda: _attend(inputs, mixed, (1, 2, 256), 50)
    yield "batch-invariant", lambda: _attend(inputs, mixed, eight, one_path=True)
    yield "FP8 cache", lambda: _attend(inputs, decodes, eight, cached="fp8")
    yield "INT8 cache", lambda: _attend(inputs, mixed, eight, cached="int8")
    prefixed = [(1, 520 + number) for number in range(8)]
    yield "shared prefix", lambda: _attend(inputs, prefixed, few, shared=512)


def _attend(
    inputs: Inputs,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    window: int = 0,
    scores: ScoreMod = PLAIN,
    one_path: bool = False,
    cached: str | None = None,
    shared: int = 0,
) -> Result:
    num_heads, group, dim = heads
    batch, num_blocks = inputs.batch(lengths)
    batch[2][:, : shared // BLOCK_SIZE] = batch[2][0, : shared // BLOCK_SIZE]
    layer = inputs.randn(2, num_blocks, num_heads, BLOCK_SIZE, dim)
    if cached is not None:
        layer = to_cache(layer, FORMATS[cached])
    query = inputs.randn(int(batch[0][-1]), num_heads * group, dim)
    plan = plan_attention(*batch, layer, window, one_path, use_cascade=bool(shared))
    found = paged_attention(query, layer, plan, scores)
    exact = replace(
        scores,
        sinks=None if scores.sinks is None else wide(scores.sinks),
        slopes=None if scores.slopes is None else wide(scores.slopes),
    )
    wide_layer = wide(dequantize(layer))
    return found, paged_attention_reference(wide(query), wide_layer, *batch, window, exact)


def mla(inputs: Inputs) -> Iterator[Case]:
    """Yield cases of MLA (decode and mixed steps)."""
    decodes, mixed = (SHORT_DECODES, SHORT_MIXED) if inputs.small else (DECODES, MIXED)
    yield "decode", lambda: _attend_latent(inputs, decodes, False)
    yield "mixed", lambda: _attend_latent(inputs, mixed, False)
    yield "batch-invariant", lambda: _attend_latent(inputs, mixed, True)


def _attend_latent(inputs: Inputs, lengths: list[tuple[int, int]], one_path: bool) -> Result:
    num_heads, query_dim, rope_dim, value_dim, rank = (
        (2, 16, 8, 16, 32) if inputs.small else (16, 128, 64, 128, 512)
    )
    batch, num_blocks = inputs.batch(lengths)
    layer = inputs.randn(1, num_blocks, 1, BLOCK_SIZE, rank + rope_dim)
    query = inputs.randn(int(batch[0][-1]), num_heads, query_dim + rope_dim)
    up = inputs.randn(num_heads, query_dim + value_dim, rank, scale=rank**-0.5)
    scale = (query_dim + rope_dim) ** -0.5
    plan = plan_mla(*batch, layer, rank, query_dim + value_dim, one_path)
    found = mla_attention(query, layer, up, plan, scale)
    return found, mla_attention_reference(wide(query), wide(layer), wide(up), *batch, scale)


def rows(inputs: Inputs) -> Iterator[Case]:
    """Yield norms, gates and rotary embeddings."""
    size = 200 if inputs.small else 4096
    x, weight, bias = inputs.randn(37, size), inputs.randn(size), inputs.randn(1, size)[0]
    wide_x, wide_weight, wide_bias = wide(x), wide(weight), wide(bias)
    above_one = 1 + wide_weight
    yield (
        "RMS norm",
        lambda: (rms_norm(x, weight, 1e-5), rms_norm_reference(wide_x, wide_weight, 1e-5)),
    )
    yield (
        "RMS norm of Gemma",
        lambda: (
            gemma_rms_norm(x, weight, 1e-5),
            rms_norm_reference(wide_x, above_one, 1e-5),
        ),
    )
    yield (
        "layer norm",
        lambda: (
            layer_norm(x, weight, bias, 1e-5),
            layer_norm_reference(wide_x, wide_weight, wide_bias, 1e-5),
        ),
    )
    yield "SiLU", lambda: (silu_and_mul(x), silu_and_mul_reference(wide_x))
    yield "GELU", lambda: (gelu_tanh_and_mul(x), gelu_tanh_and_mul_reference(wide_x))
    yield (
        "clamped gate",
        lambda: (swiglu_oai(x, 1.702, 7.0), swiglu_oai_reference(wide_x, 1.702, 7.0)),
    )
    yield "rotary embedding", lambda: _rotate(inputs)


def _rotate(inputs: Inputs) -> Result:
    positions, frequencies = torch.arange(5, 26), 10000.0 ** -(torch.arange(32) / 32)
    table = rotary_table(frequencies, 26, torch.float32)[positions]
    x = inputs.randn(len(positions), 5, 64)
    # The reference result has the dtype of its input, so widen the input first.
    exact = rotate_reference(wide(x), positions, frequencies)
    table = table.to(inputs.device, torch.float32 if x.is_cuda else inputs.dtype)
    rotate_(x, table)
    return x, exact


def products(inputs: Inputs) -> Iterator[Case]:
    """Yield batch-invariant matmuls, and matmuls with weights quantized to 4 and 8 bits.

    Products of quantized activations (W8A8) are left out on devices that lack their tensor cores.
    """
    rows, outputs, size = (5, 40, 70) if inputs.small else (130, 1100, 4096)
    x, weight = inputs.randn(rows, size), inputs.randn(outputs, size, scale=size**-0.5)
    bias = inputs.randn(outputs)
    yield (
        "batch-invariant product",
        lambda: (
            batch_invariant_matmul(x, weight, bias),
            batch_invariant_matmul_reference(x.cpu(), weight.cpu(), bias.cpu()),
        ),
    )
    heads = inputs.randn(rows, 3, size)
    weights = inputs.randn(3, 24, size, scale=size**-0.5)
    yield (
        "batch-invariant product of heads",
        lambda: (
            batch_invariant_bmm(heads, weights),
            batch_invariant_bmm_reference(heads.cpu(), weights.cpu()),
        ),
    )
    kinds: tuple[Kind, ...] = ("int4", "int8", "fp8", "e2m1", "nf4", "fp4")
    for kind in kinds:
        yield f"{kind} weights", partial(_weight_only, inputs, 5, kind, 128)
    yield "int4 weights, many rows", lambda: _weight_only(inputs, 70, "int4", 128)
    yield "int4 weights, groups of 32", lambda: _weight_only(inputs, 5, "int4", 32)
    w8a8: tuple[tuple[Form, bool], ...] = (("int8", False), ("fp8", False), ("fp8", True))
    for form, has_groups in w8a8:
        if has_w8a8_products(form, inputs.device):
            for rows in (5, 70):
                scales = "groups of 128" if has_groups else "one scale per row"
                name = f"{form} weights and activations, {scales}, {rows} rows"
                yield name, partial(_w8a8, inputs, rows, form, has_groups)


def _w8a8(inputs: Inputs, rows: int, form: Form, has_groups: bool) -> Result:
    outputs, size = (70, 260) if inputs.small else (1100, 4100)
    group = FP8_GROUP_INPUTS if has_groups else size
    x, bias = inputs.randn(rows, size), inputs.randn(outputs)
    weight, scales = quantize_activations_reference(
        inputs.randn(outputs, size, scale=size**-0.5).cpu(), form, group
    )
    layer = W8A8Linear(
        form, weight.to(inputs.device), scales.T.contiguous().to(inputs.device), bias
    )
    codes, row_scales = quantize_activations_reference(x.cpu(), form, group)
    return layer(x), w8a8_matmul_reference(
        codes, row_scales, weight, scales.T.contiguous(), bias.cpu()
    )


def _weight_only(inputs: Inputs, rows: int, kind: Kind, group: int) -> Result:
    outputs, size = (70, 256) if inputs.small else (1100, 4096)
    generator = torch.Generator().manual_seed(rows)

    def codes(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator).to(torch.uint8)

    width = size // 2 if is_narrow(kind) else size
    matrix = QuantizedMatrix(
        kind,
        # FP8 codes below 128 are the positive numbers.
        codes(120 if kind == "fp8" else 256, outputs, width),
        torch.rand(outputs, size // group, generator=generator) * size**-0.5,
        codes(16, outputs, size // group if has_zeros(kind) else 0),
        even_groups(size, group, torch.device("cpu")),
    )
    x, bias = inputs.randn(rows, size), inputs.randn(outputs)
    tensors = matrix.codes, matrix.scales, matrix.zeros, matrix.groups
    on_device = QuantizedMatrix(kind, *(each.to(inputs.device) for each in tensors))
    found = pack_quantized(on_device, bias, inputs.dtype)(x)
    return found, wide(x) @ wide(matrix.dequantize()).T + wide(bias)


def moe(inputs: Inputs) -> Iterator[Case]:
    """Yield mixtures of experts with few and with many rows per expert."""
    for num_tokens in (3, 40) if inputs.small else (3, 130, 2000):
        yield f"SiLU, {num_tokens} tokens", partial(_mix, inputs, num_tokens, False)
    yield "clamped with biases", lambda: _mix(inputs, 9, True)


def _mix(inputs: Inputs, num_tokens: int, clamped: bool) -> Result:
    num_experts, size, inner, top_k = (4, 40, 24, 2) if inputs.small else (16, 512, 384, 4)
    gate = GatedActivation("clamped", 1.702, 7.0) if clamped else GatedActivation("silu")
    gate_up = inputs.randn(num_experts, size, 2 * inner, scale=size**-0.5)
    down = inputs.randn(num_experts, inner, size, scale=inner**-0.5)
    biases = (
        (inputs.randn(num_experts, 2 * inner), inputs.randn(num_experts, size))
        if clamped
        else (None, None)
    )
    x = inputs.randn(num_tokens, size)
    order = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(1))
    experts = order.argsort(-1)[:, :top_k].to(torch.int32)
    weights = torch.full((num_tokens, top_k), 1 / top_k)
    stacks = ExpertWeights(gate_up, down, gate, *biases)
    on_host = ExpertWeights(
        gate_up.cpu(), down.cpu(), gate, *(None if b is None else b.cpu() for b in biases)
    )
    found = grouped_moe_forward(x, experts.to(inputs.device), weights.to(inputs.device), stacks)
    return found, grouped_moe_forward_reference(x.cpu(), experts, weights, on_host)


def blocks(inputs: Inputs) -> Iterator[Case]:
    """Yield cases of KV block copies and checksums. The results must be exact."""
    yield "gather and scatter", lambda: _move(inputs)
    data = inputs.randn(1001)
    yield "checksum", lambda: (_integer(checksum(data)), _integer(_expected_checksum(data)))


def _move(inputs: Inputs) -> Result:
    kv = inputs.randn(3, 2, 9, 4, BLOCK_SIZE, 64)
    expected = wide(kv)
    sources, targets = [7, 0, 3], [1, 8, 2]
    layers, heads = slice(1, 3), slice(1, 3)
    expected[layers, :, targets, heads] = expected[layers, :, sources, heads]
    from_blocks, to_blocks = torch.tensor([sources, targets], dtype=torch.int32).to(inputs.device)
    staged = gather_blocks(kv, from_blocks, layers, heads)
    scatter_blocks(kv, to_blocks, layers, heads, staged)
    return kv, expected


def _expected_checksum(data: Tensor) -> int:
    return checksum_reference(data.cpu().view(torch.uint8).numpy().tobytes())


def _integer(value: int) -> Tensor:
    """Return an integer below 2^64 as two floats without rounding."""
    return torch.tensor([value >> 32, value & 0xFFFFFFFF], dtype=torch.float64)


GROUPS: dict[str, Callable[[Inputs], Iterator[Case]]] = {
    "attention": attention,
    "mla": mla,
    "rows": rows,
    "products": products,
    "moe": moe,
    "sampling": sampling,
    "blocks": blocks,
}
"""Groups of cases, by name."""

EXACT = ("blocks",)
"""Groups whose results must have no error."""
