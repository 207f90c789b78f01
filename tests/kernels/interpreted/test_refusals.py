"""Every tensor that a launcher takes, spoiled in ways that a kernel would turn into a wild read:
refused, by its name."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.activation.op import gelu_tanh_and_mul, silu_and_mul, swiglu_oai
from penstock.kernels.attention.op import paged_attention, plan_attention, plan_attention_on_device
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.kv_cache.block_copy import copy_blocks, gather_blocks, scatter_blocks
from penstock.kernels.kv_cache.checksum import checksum, sum_words
from penstock.kernels.kv_cache.op import rope_and_cache, write_kv
from penstock.kernels.linear.batch_invariant import batch_invariant_bmm, batch_invariant_matmul
from penstock.kernels.mla.op import (
    mla_attention,
    plan_mla,
    plan_mla_on_device,
)
from penstock.kernels.moe.align import align_blocks
from penstock.kernels.moe.op import ExpertWeights, GatedActivation, grouped_moe_forward
from penstock.kernels.moe.routing import Routing, route
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
from penstock.kernels.triton_common.launch import E4M3

pytestmark = pytest.mark.interpreted

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "rank": lambda tensor: tensor[None],
    "rows": lambda tensor: tensor[:-1],
    "dtype": lambda tensor: tensor.to(torch.bool),
    "strides": lambda tensor: torch.stack((tensor, tensor), -1)[..., 0],
    "device": lambda tensor: tensor.to("meta"),
}


ALL = set(WAYS)
ROWS, RANK, DTYPE = {"rows"}, {"rank"}, {"dtype"}
LEADS = {"rows", "device"}
"""The first tensor is what others are held to: they are named in its place."""


@dataclass(frozen=True)
class Launcher:
    """may: in which ways a tensor may differ, or has another one named."""

    call: Callable[..., object]
    tensors: Callable[[], dict[str, Tensor]]
    may: dict[str, set[str]] = field(default_factory=dict)


def floats(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.ones(shape) for name, shape in shapes.items()}


def ints(dtype: torch.dtype = torch.int64, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def of_batch(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    sizes = {"context_lens": (3,), "query_starts": (4,), "block_tables": (3, 2)}
    return floats(**shapes) | ints(torch.int32, **sizes)


BATCH = np.array([0, 3]), np.array([5]), np.array([[0, 1]])
PAGED, LATENT = (2, 4, 2, 8, 16), (1, 4, 1, 8, 20)


def paged(layer: Tensor, query: Tensor, **scores: Tensor) -> object:
    plan = plan_attention(*BATCH, torch.zeros(PAGED))
    return paged_attention(query, layer, plan, ScoreMod(**scores))  # type: ignore[arg-type]


def narrow(layer: Tensor, query: Tensor, scales: Tensor) -> object:
    layer = layer.to(E4M3)
    return paged_attention(query, layer, plan_attention(*BATCH, layer), scales=scales)


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


WHOLE = slice(0, 2), slice(0, 2)
LAUNCHERS = {
    "paged attention": Launcher(
        paged, lambda: floats(layer=PAGED, query=(3, 6, 16), sinks=(6,), slopes=(6,))
    ),
    "paged attention, narrow": Launcher(
        narrow,
        lambda: floats(layer=PAGED, query=(3, 6, 16), scales=(2, 2)),
        {"layer": ALL},
    ),
    "device plan": Launcher(
        lambda layer, **batch: plan_attention_on_device(
            **batch, layer=layer, max_query=1, max_context=16
        ),
        lambda: of_batch(layer=PAGED),
        {"layer": DTYPE | {"device"}, "context_lens": ROWS},
    ),
    "latent attention": Launcher(
        latent, lambda: floats(layer=LATENT, up=(3, 12, 16), query=(3, 3, 10)), {"up": ROWS}
    ),
    "latent device plan": Launcher(
        lambda layer, **batch: plan_mla_on_device(
            **batch, layer=layer, rank=16, max_query=1, max_context=16
        ),
        lambda: of_batch(layer=LATENT),
        {"layer": DTYPE | {"device"}, "context_lens": ROWS},
    ),
    "write": Launcher(
        write_kv,
        lambda: floats(layer=PAGED, new=(3, 4, 16)) | ints(rows=(3,)),
        {"layer": LEADS, "new": ROWS},
    ),
    "turn and write": Launcher(
        lambda layer, **others: rope_and_cache(num_heads=2, layer=layer, **others),
        lambda: floats(layer=PAGED, heads=(3, 6, 16), cos_sin=(3, 2, 8)) | ints(rows=(3,)),
        {"layer": LEADS, "heads": ROWS},
    ),
    "turn and write, narrow": Launcher(
        lambda layer, **others: rope_and_cache(
            num_heads=2, layer=layer.to(E4M3), interleaved=True, **others
        ),
        lambda: (
            floats(layer=PAGED, heads=(3, 6, 16), cos_sin=(3, 2, 8), scales=(2, 2))
            | ints(rows=(3,))
        ),
        {"layer": ALL, "heads": ROWS},
    ),
    "gather": Launcher(
        lambda kv, blocks: gather_blocks(kv, blocks, *WHOLE),
        lambda: floats(kv=(2, 2, 5, 2, 4, 8)) | ints(blocks=(3,)),
        {"kv": LEADS | DTYPE, "blocks": ROWS},
    ),
    "scatter": Launcher(
        lambda kv, blocks, staged: scatter_blocks(kv, blocks, *WHOLE, staged),
        lambda: (
            floats(kv=(2, 2, 5, 2, 4, 8), staged=(2, 2, 3, 2, 4, 8))
            | ints(torch.int32, blocks=(3,))
        ),
        {"kv": LEADS | DTYPE, "blocks": ROWS},
    ),
    "copy": Launcher(
        copy_blocks,
        lambda: floats(kv=(2, 2, 5, 2, 4, 8)) | ints(sources=(3,), targets=(3,)),
        {"kv": LEADS | DTYPE, "sources": ROWS},
    ),
    "checksum": Launcher(checksum, lambda: floats(data=(3, 4)), {"data": ALL - {"strides"}}),
    "sum of words": Launcher(sum_words, lambda: ints(words=(8,), weights=(9,)), {"words": LEADS}),
    "norm": Launcher(
        lambda x, weight: rms_norm(x, weight, 1e-5),
        lambda: floats(x=(3, 8), weight=(8,)),
        {"x": LEADS | RANK},
    ),
    "norm in place": Launcher(
        lambda x, weight: rms_norm_(x, weight, 1e-5),
        lambda: floats(x=(3, 8), weight=(8,)),
        {"x": LEADS | RANK},
    ),
    "layer norm": Launcher(
        lambda x, weight, bias: layer_norm(x, weight, bias, 1e-5),
        lambda: floats(x=(3, 8), weight=(8,), bias=(8,)),
        {"x": LEADS | RANK},
    ),
    "layer norm of a sum": Launcher(
        lambda **given: fused_add_layer_norm(**given, eps=1e-5),
        lambda: floats(hidden=(3, 8), x=(3, 8), weight=(8,), bias=(8,)),
        {"hidden": LEADS | RANK},
    ),
    "norm of a sum": Launcher(
        lambda **given: fused_add_rms_norm(**given, eps=1e-5),
        lambda: floats(hidden=(3, 8), x=(3, 8), weight=(8,)),
        {"hidden": LEADS | RANK},
    ),
    "rotation": Launcher(rotate_, lambda: floats(x=(3, 2, 8), cos_sin=(3, 2, 8)), {"x": LEADS}),
    "silu": Launcher(silu_and_mul, lambda: floats(gate_up=(3, 8)), {"gate_up": LEADS}),
    "gelu": Launcher(gelu_tanh_and_mul, lambda: floats(gate_up=(3, 8)), {"gate_up": LEADS}),
    "clamped silu": Launcher(
        lambda gate_up: swiglu_oai(gate_up, 1.7, 7.0),
        lambda: floats(gate_up=(3, 8)),
        {"gate_up": LEADS},
    ),
    "routing": Launcher(
        lambda logits, bias: route(logits, Routing(2), bias),
        lambda: floats(logits=(3, 8), bias=(8,)),
        {"logits": LEADS},
    ),
    "sort": Launcher(
        lambda experts: align_blocks(experts, 4, 16),
        lambda: ints(torch.int32, experts=(3, 2)),
        {"experts": LEADS},
    ),
    "experts": Launcher(
        mixed,
        lambda: (
            floats(x=(3, 8), weights=(3, 2), down=(4, 5, 8), gate_up=(4, 8, 10))
            | floats(down_bias=(4, 8), gate_up_bias=(4, 10))
            | ints(torch.int32, experts=(3, 2))
        ),
        {"x": LEADS, "down": ROWS, "experts": ROWS},
    ),
    "invariant product": Launcher(
        batch_invariant_matmul,
        lambda: floats(x=(3, 8), weight=(5, 8), bias=(5,)),
        {"x": LEADS, "weight": ROWS},
    ),
    "invariant heads": Launcher(
        batch_invariant_bmm, lambda: floats(x=(3, 2, 8), weight=(2, 5, 8)), {"x": LEADS}
    ),
    "draw": Launcher(
        lambda logits, **wishes: sample(logits, SamplingTensors(**wishes)),
        lambda: (
            floats(logits=(3, 9), temperature=(3,), top_p=(3,), min_p=(3,), typical_p=(3,))
            | ints(top_k=(3,), seeds=(3,), indices=(3,), choices=(3,))
        ),
        {"logits": LEADS},
    ),
    "logprobs": Launcher(
        lambda logits, tokens: logprobs(logits, tokens, 2),
        lambda: floats(logits=(3, 9)) | ints(tokens=(3,)),
        {"logits": LEADS},
    ),
    "penalties": Launcher(
        penalised,
        lambda: (
            floats(logits=(3, 9), repetition=(3,), presence=(3,), frequency=(3,))
            | ints(tokens=(3, 4), num_prompt=(3,), num_tokens=(3,))
        ),
        {"logits": LEADS},
    ),
    "shift": Launcher(
        add_logit_bias_,
        lambda: floats(logits=(3, 9), values=(4,)) | ints(rows=(4,), tokens=(4,)),
        {"logits": LEADS, "rows": ROWS},
    ),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_what_is_right_is_taken(name: str) -> None:
    LAUNCHERS[name].call(**LAUNCHERS[name].tensors())


@pytest.mark.parametrize("name", LAUNCHERS)
def test_what_is_wrong_is_refused_by_its_name(name: str) -> None:
    launcher, taken = LAUNCHERS[name], []
    for tensor in launcher.tensors():
        for way in sorted(ALL - launcher.may.get(tensor, set())):
            given = launcher.tensors()
            given[tensor] = WAYS[way](given[tensor])
            try:
                launcher.call(**given)
            except ValueError as error:
                if str(error).startswith(f"{tensor}: "):
                    continue
                taken.append(f"{tensor}, {way}: {error}")
            else:
                taken.append(f"{tensor}, {way}: it was taken")
    assert not taken
