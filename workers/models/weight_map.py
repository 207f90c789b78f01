"""Maps the tensor names of a checkpoint to the parameters of the layers."""

from collections.abc import Iterator
from dataclasses import replace

from penstock.workers.layers.attention import Attention
from penstock.workers.layers.decoder_layer import DecoderLayer
from penstock.workers.layers.expert_parallel import ExpertParallelMoE
from penstock.workers.layers.expert_stacks import ExpertStack
from penstock.workers.layers.linear import Linear, RowParallelLinear
from penstock.workers.layers.mla import LatentAttention
from penstock.workers.layers.mlp import Mlp
from penstock.workers.layers.moe import MoE
from penstock.workers.layers.parameter import Parameter, parameter
from penstock.workers.models.tensor_names import TensorNames

Modules = tuple[str, ...]
"""Names of the checkpoint's modules that a `Linear` fuses, in the order of its outputs."""

NamedLinears = Iterator[tuple[Modules, Linear]]


def layer_linears(block: DecoderLayer, names: TensorNames, number: int) -> NamedLinears:
    """Yield one layer's `Linear`s with the full names of their modules, except stacked experts."""
    if isinstance(block.attention, LatentAttention):
        found = _latent_linears(block.attention, names)
    else:
        found = _attention_linears(block.attention, names)
    for modules, linear in (*found, *_feed_forward_linears(block, names)):
        yield tuple(f"{names.layers}.{number}.{name}" for name in modules), linear


def layer_stacks(
    block: DecoderLayer, names: TensorNames, number: int
) -> Iterator[tuple[str, ExpertStack]]:
    """Yield one layer's stacks of experts with their full names in the checkpoint."""
    if isinstance(block.mlp, MoE | ExpertParallelMoE):
        for name, stack in (block.mlp.stacks or {}).items():
            yield f"{names.layers}.{number}.{names.experts}.experts.{name}", stack


def layer_parameters(block: DecoderLayer, names: TensorNames, number: int) -> dict[str, Parameter]:
    """Return one layer's parameters by the full names of the tensors in the checkpoint."""
    found: dict[str, Parameter] = {}
    for modules, linear in layer_linears(block, names, number):
        found |= linear.parameters(modules)
    latent = block.attention if isinstance(block.attention, LatentAttention) else None
    # MLA reads the weights of `up` transposed, so `LatentAttention` owns them and prepares them
    # after loading
    if latent is not None:
        found |= {
            name: replace(each, owner=latent)
            for name, each in found.items()
            if each.owner is latent.up
        }
    for name, stack in layer_stacks(block, names, number):
        found |= stack.parameters(name)
    others = _other_parameters(block, names)
    return found | {f"{names.layers}.{number}.{name}": each for name, each in others.items()}


def _other_parameters(block: DecoderLayer, names: TensorNames) -> dict[str, Parameter]:
    """Return the layer's parameters outside of `Linear`s, by names relative to the layer."""
    norms = [
        (block.attention_norm, names.attention_norm),
        (block.attention_post_norm, names.attention_post_norm),
        (block.mlp_norm, names.mlp_norm),
        (block.mlp_post_norm, names.mlp_post_norm),
    ]
    found: dict[str, Parameter] = {}
    if isinstance(block.attention, LatentAttention):
        norms += [
            (block.attention.row_norm, names.row_norm),
            (block.attention.query_norm, names.query_norm),
        ]
    else:
        norms += [(block.attention.q_norm, names.q_norm), (block.attention.k_norm, names.k_norm)]
        sinks = block.attention.scores.sinks
        if sinks is not None:
            found[names.sinks] = parameter(block.attention, sinks)
    for norm, name in norms:
        if norm is not None:
            found |= norm.parameters(name)
    moe = block.mlp
    if isinstance(moe, MoE | ExpertParallelMoE) and moe.bias is not None:
        found[f"{names.experts}.{names.router_bias}"] = parameter(moe.router, moe.bias)
    return found


def _attention_linears(attention: Attention, names: TensorNames) -> NamedLinears:
    yield names.qkv, attention.qkv
    yield (names.output,), _without_reduce(attention.output)


def _latent_linears(attention: LatentAttention, names: TensorNames) -> NamedLinears:
    query = names.qkv[0] if attention.query_up is None else names.query_down
    yield (query, names.row_down), attention.down
    yield (names.row_up,), attention.up
    yield (names.output,), _without_reduce(attention.output)
    if attention.query_up is not None:
        yield (names.query_up,), attention.query_up


def _feed_forward_linears(block: DecoderLayer, names: TensorNames) -> NamedLinears:
    moe = block.mlp
    if not isinstance(moe, MoE | ExpertParallelMoE):
        yield from _mlp_linears(moe, names.mlp, names.gate_up, names.down)
        return
    prefix = names.experts
    yield (f"{prefix}.{names.router}",), moe.router
    if moe.stacks is not None:
        return
    first = 0
    if isinstance(moe, ExpertParallelMoE):
        first = moe.coord.experts(len(moe.load)).start
    for number, expert in enumerate(moe.experts, first):
        module = f"{prefix}.experts.{number}"
        yield from _mlp_linears(expert, module, names.expert_gate_up, names.expert_down)
    if moe.shared is not None:
        module = f"{prefix}.{names.shared}"
        yield from _mlp_linears(moe.shared.mlp, module, names.gate_up, names.down)
        if moe.shared.gate is not None:
            yield (f"{prefix}.{names.shared_gate}",), moe.shared.gate


def _mlp_linears(mlp: Mlp, prefix: str, gate_up: tuple[str, ...], down: str) -> NamedLinears:
    yield tuple(f"{prefix}.{name}" for name in gate_up), mlp.gate_up
    yield (f"{prefix}.{down}",), _without_reduce(mlp.down)


def _without_reduce(linear: Linear | RowParallelLinear) -> Linear:
    return linear.linear if isinstance(linear, RowParallelLinear) else linear
