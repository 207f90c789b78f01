"""Every launcher refuses, by name, each tensor whose shape, dtype, strides or device is wrong.

A kernel would read or write out of bounds with such a tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.activation.op import gelu_tanh_and_mul, silu_and_mul, swiglu_oai
from penstock.kernels.attention.op import paged_attention, plan_attention, plan_attention_on_device
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.attention.triton_plan import TiledPlanner
from penstock.kernels.checks import E4M3
from penstock.kernels.kv_cache.block_copy import copy_blocks, gather_blocks, scatter_blocks
from penstock.kernels.kv_cache.checksum import CHUNK, checksum, sum_words
from penstock.kernels.kv_cache.op import rope_and_cache, write_kv
from penstock.kernels.linear.batch_invariant import batch_invariant_bmm, batch_invariant_matmul
from penstock.kernels.linear.quantized import quantized_matmul
from penstock.kernels.linear.w8a8 import quantize_activations, w8a8_matmul
from penstock.kernels.mla.op import (
    mla_attention,
    plan_mla,
    plan_mla_on_device,
)
from penstock.kernels.moe.op import ExpertWeights, GatedActivation, grouped_moe_forward
from penstock.kernels.moe.routing import Routing, route
from penstock.kernels.moe.triton_align import align_blocks
from penstock.kernels.norm.op import (
    fused_add_layer_norm,
    fused_add_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_,
)
from penstock.kernels.rope.op import rotate_
from penstock.kernels.sampling.logprobs import logprobs
from penstock.kernels.sampling.op import SamplingTensors, sample
from penstock.kernels.sampling.penalties import Penalties, add_logit_bias_, apply_penalties_
from penstock.kernels.sampling.token_mask import apply_token_mask_

pytestmark = pytest.mark.interpreted

CORRUPTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rank": lambda tensor: tensor[None],
    "rows": lambda tensor: tensor[:-1],
    "dtype": lambda tensor: tensor.to(torch.bool),
    "strides": lambda tensor: torch.stack((tensor, tensor), -1)[..., 0],
    "device": lambda tensor: tensor.to("meta"),
}


ALL = set(CORRUPTIONS)
ROWS, RANK, DTYPE = {"rows"}, {"rank"}, {"dtype"}
REFERENCE = {"rows", "device"}
"""Corruptions that are not tested for the first tensor: the other tensors are compared with it, so
the error names another tensor."""


@dataclass(frozen=True)
class Launcher:
    """A launcher under test.

    Attributes:
        call: calls the launcher with tensors by name.
        tensors: makes valid tensors.
        exempt: by tensor, corruptions that are valid, or whose error names another tensor.
    """

    call: Callable[..., object]
    tensors: Callable[[], dict[str, Tensor]]
    exempt: dict[str, set[str]] = field(default_factory=dict)


def floats(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.ones(shape) for name, shape in shapes.items()}


def ints(dtype: torch.dtype = torch.int64, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def batch_and(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    sizes = {"context_lens": (3,), "query_starts": (4,), "block_tables": (3, 2)}
    return floats(**shapes) | ints(torch.int32, **sizes)


BATCH = np.array([0, 3]), np.array([5]), np.array([[0, 1]])
PAGED, LATENT = (2, 4, 2, 8, 16), (1, 4, 1, 8, 20)


def paged(layer: Tensor, query: Tensor, **scores: Tensor) -> object:
    plan = plan_attention(*BATCH, torch.zeros(PAGED))
    return paged_attention(query, layer, plan, ScoreMod(**scores))  # type: ignore[arg-type]


def narrow(layer: Tensor, query: Tensor) -> object:
    layer = layer.to(torch.int8)
    return paged_attention(query, layer, plan_attention(*BATCH, layer))


def latent(layer: Tensor, query: Tensor, up: Tensor) -> object:
    plan = plan_mla(*BATCH, torch.zeros(LATENT), 16, 12)
    return mla_attention(query, layer, up, plan, 0.3)


def penalised(
    logits: Tensor, tokens: Tensor, num_prompt: Tensor, num_tokens: Tensor, **own: Tensor
) -> None:
    apply_penalties_(logits, tokens, num_prompt, num_tokens, Penalties(**own))


def mixed(x: Tensor, experts: Tensor, weights: Tensor, **stacks: Tensor) -> object:
    return grouped_moe_forward(
        x, experts, weights, ExpertWeights(gate=GatedActivation("silu"), **stacks)
    )


def prepared() -> TiledPlanner:
    planner = TiledPlanner()
    planner.prepare(np.arange(4), np.full(3, 16), is_captured=False)
    return planner


WHOLE = slice(0, 2), slice(0, 2)
LAUNCHERS = {
    "paged attention": Launcher(
        paged, lambda: floats(layer=PAGED, query=(3, 6, 16), sinks=(6,), slopes=(6,))
    ),
    "paged attention, int8": Launcher(
        narrow, lambda: floats(layer=PAGED, query=(3, 6, 14)), {"layer": ALL}
    ),
    "device plan": Launcher(
        lambda layer, **batch: plan_attention_on_device(
            **batch, layer=layer, planner=prepared(), max_context=16
        ),
        lambda: batch_and(layer=PAGED),
        {"layer": DTYPE | {"device"}, "context_lens": ROWS},
    ),
    "mla": Launcher(
        latent, lambda: floats(layer=LATENT, up=(3, 12, 16), query=(3, 3, 10)), {"up": ROWS}
    ),
    "mla device plan": Launcher(
        lambda layer, **batch: plan_mla_on_device(
            **batch, layer=layer, rank=16, planner=prepared(), max_context=16
        ),
        lambda: batch_and(layer=LATENT),
        {"layer": DTYPE | {"device"}, "context_lens": ROWS},
    ),
    "write": Launcher(
        write_kv,
        lambda: floats(layer=PAGED, new=(3, 4, 16)) | ints(rows=(3,)),
        {"layer": REFERENCE, "new": ROWS},
    ),
    "rope and write": Launcher(
        lambda layer, **others: rope_and_cache(num_heads=2, layer=layer, **others),
        lambda: floats(layer=PAGED, heads=(3, 6, 16), cos_sin=(3, 2, 8)) | ints(rows=(3,)),
        {"layer": REFERENCE, "heads": ROWS},
    ),
    "rope and write, fp8": Launcher(
        lambda layer, **others: rope_and_cache(
            num_heads=2, layer=layer.to(E4M3), interleaved=True, **others
        ),
        lambda: floats(layer=PAGED, heads=(3, 6, 14), cos_sin=(3, 2, 8)) | ints(rows=(3,)),
        {"layer": ALL, "heads": ROWS},
    ),
    "gather": Launcher(
        lambda kv, blocks: gather_blocks(kv, blocks, *WHOLE),
        lambda: floats(kv=(2, 2, 5, 2, 4, 8)) | ints(blocks=(3,)),
        {"kv": REFERENCE | DTYPE, "blocks": ROWS},
    ),
    "scatter": Launcher(
        lambda kv, blocks, staged: scatter_blocks(kv, blocks, *WHOLE, staged),
        lambda: (
            floats(kv=(2, 2, 5, 2, 4, 8), staged=(2, 2, 3, 2, 4, 8))
            | ints(torch.int32, blocks=(3,))
        ),
        {"kv": REFERENCE | DTYPE, "blocks": ROWS},
    ),
    "copy": Launcher(
        copy_blocks,
        lambda: floats(kv=(2, 2, 5, 2, 4, 8)) | ints(sources=(3,), targets=(3,)),
        {"kv": REFERENCE | DTYPE, "sources": ROWS},
    ),
    "checksum": Launcher(checksum, lambda: floats(data=(3, 4)), {"data": ALL - {"strides"}}),
    "sum of words": Launcher(
        sum_words,
        lambda: ints(words=(8,), weights=(CHUNK + 1,), chunk_weights=(2,)),
        {"words": REFERENCE},
    ),
    "norm": Launcher(
        lambda x, weight: rms_norm(x, weight, 1e-5),
        lambda: floats(x=(3, 8), weight=(8,)),
        {"x": REFERENCE | RANK},
    ),
    "norm in place": Launcher(
        lambda x, weight: rms_norm_(x, weight, 1e-5),
        lambda: floats(x=(3, 8), weight=(8,)),
        {"x": REFERENCE | RANK},
    ),
    "layer norm": Launcher(
        lambda x, weight, bias: layer_norm(x, weight, bias, 1e-5),
        lambda: floats(x=(3, 8), weight=(8,), bias=(8,)),
        {"x": REFERENCE | RANK},
    ),
    "layer norm of a sum": Launcher(
        lambda **tensors: fused_add_layer_norm(**tensors, eps=1e-5),
        lambda: floats(hidden=(3, 8), x=(3, 8), weight=(8,), bias=(8,)),
        {"hidden": REFERENCE | RANK},
    ),
    "norm of a sum": Launcher(
        lambda **tensors: fused_add_rms_norm(**tensors, eps=1e-5),
        lambda: floats(hidden=(3, 8), x=(3, 8), weight=(8,)),
        {"hidden": REFERENCE | RANK},
    ),
    "rotation": Launcher(rotate_, lambda: floats(x=(3, 2, 8), cos_sin=(3, 2, 8)), {"x": REFERENCE}),
    "silu": Launcher(silu_and_mul, lambda: floats(gate_up=(3, 8)), {"gate_up": REFERENCE}),
    "gelu": Launcher(gelu_tanh_and_mul, lambda: floats(gate_up=(3, 8)), {"gate_up": REFERENCE}),
    "clamped silu": Launcher(
        lambda gate_up: swiglu_oai(gate_up, 1.7, 7.0),
        lambda: floats(gate_up=(3, 8)),
        {"gate_up": REFERENCE},
    ),
    "routing": Launcher(
        lambda logits, bias: route(logits, Routing(2), bias),
        lambda: floats(logits=(3, 8), bias=(8,)),
        {"logits": REFERENCE},
    ),
    "align": Launcher(
        lambda experts: align_blocks(experts, 4, 16),
        lambda: ints(torch.int32, experts=(3, 2)),
        {"experts": REFERENCE},
    ),
    "grouped experts": Launcher(
        mixed,
        lambda: (
            floats(x=(3, 8), weights=(3, 2), down=(4, 5, 8), gate_up=(4, 8, 10))
            | floats(down_bias=(4, 8), gate_up_bias=(4, 10))
            | ints(torch.int32, experts=(3, 2))
        ),
        {"x": REFERENCE, "down": ROWS, "experts": ROWS},
    ),
    "invariant product": Launcher(
        batch_invariant_matmul,
        lambda: floats(x=(3, 8), weight=(5, 8), bias=(5,)),
        {"x": REFERENCE, "weight": ROWS},
    ),
    "invariant heads": Launcher(
        batch_invariant_bmm, lambda: floats(x=(3, 2, 8), weight=(2, 5, 8)), {"x": REFERENCE}
    ),
    "quantized product": Launcher(
        partial(quantized_matmul, kind="int4"),
        lambda: (
            floats(x=(3, 8), scales=(5, 2), bias=(5,))
            | {
                "codes": torch.zeros(5, 4, dtype=torch.uint8),
                "zeros": torch.zeros(5, 2, dtype=torch.uint8),
            }
            | ints(torch.int32, groups=(8,))
        ),
        {"x": REFERENCE, "codes": ROWS},
    ),
    "quantized activations": Launcher(
        lambda x: quantize_activations(x, "fp8", 8), lambda: floats(x=(3, 8)), {"x": REFERENCE}
    ),
    "W8A8 product": Launcher(
        partial(w8a8_matmul, dtype=torch.float32),
        lambda: (
            floats(x_scales=(3, 2), weight_scales=(2, 5), bias=(5,))
            | {name: torch.ones(rows, 200).to(E4M3) for name, rows in (("x", 3), ("weight", 5))}
        ),
        {"x": REFERENCE, "weight": ROWS},
    ),
    "sample": Launcher(
        lambda logits, **params: sample(logits, SamplingTensors(**params)),
        lambda: (
            floats(logits=(3, 9), temperature=(3,), top_p=(3,), min_p=(3,), typical_p=(3,))
            | ints(top_k=(3,), seeds=(3,), indices=(3,), choices=(3,))
        ),
        {"logits": REFERENCE},
    ),
    "logprobs": Launcher(
        lambda logits, tokens: logprobs(logits, tokens, 2),
        lambda: floats(logits=(3, 9)) | ints(tokens=(3,)),
        {"logits": REFERENCE},
    ),
    "penalties": Launcher(
        penalised,
        lambda: (
            floats(logits=(3, 9), repetition=(3,), presence=(3,), frequency=(3,))
            | ints(tokens=(3, 4), num_prompt=(3,), num_tokens=(3,))
        ),
        {"logits": REFERENCE},
    ),
    "logit bias": Launcher(
        add_logit_bias_,
        lambda: floats(logits=(3, 9), values=(4,)) | ints(rows=(4,), tokens=(4,)),
        {"logits": REFERENCE, "rows": ROWS},
    ),
    "token mask": Launcher(
        apply_token_mask_,
        lambda: floats(logits=(3, 40)) | ints(rows=(2,)) | ints(torch.int32, words=(2, 3)),
        {"logits": REFERENCE, "rows": ROWS},
    ),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_valid_arguments_are_accepted(name: str) -> None:
    LAUNCHERS[name].call(**LAUNCHERS[name].tensors())


@pytest.mark.parametrize("name", LAUNCHERS)
def test_each_invalid_tensor_is_refused_by_name(name: str) -> None:
    launcher, accepted = LAUNCHERS[name], []
    for tensor in launcher.tensors():
        for corruption in sorted(ALL - launcher.exempt.get(tensor, set())):
            tensors = launcher.tensors()
            tensors[tensor] = CORRUPTIONS[corruption](tensors[tensor])
            try:
                launcher.call(**tensors)
            except ValueError as error:
                if str(error).startswith(f"{tensor} "):
                    continue
                accepted.append(f"{tensor}, {corruption}: {error}")
            else:
                accepted.append(f"{tensor}, {corruption}: accepted")
    assert not accepted
