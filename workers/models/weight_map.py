"""Maps the tensor names of a checkpoint to the parameters of the layers."""

from penstock.workers.layers.attention import Attention
from penstock.workers.layers.decoder_layer import DecoderLayer
from penstock.workers.layers.expert_parallel import ExpertParallelMoE
from penstock.workers.layers.mla import LatentAttention
from penstock.workers.layers.mlp import Mlp
from penstock.workers.layers.moe import MoE
from penstock.workers.layers.parameter import Parameter, parameter
from penstock.workers.models.tensor_names import TensorNames


def layer_parameters(block: DecoderLayer, names: TensorNames, number: int) -> dict[str, Parameter]:
    """Return one layer's parameters by the full names of the tensors in the checkpoint."""
    if isinstance(block.attention, LatentAttention):
        found = _latent_parameters(block.attention, names)
    else:
        found = _attention_parameters(block.attention, names)
    norms = (
        (block.attention_norm, names.attention_norm),
        (block.attention_post_norm, names.attention_post_norm),
        (block.mlp_norm, names.mlp_norm),
        (block.mlp_post_norm, names.mlp_post_norm),
    )
    for norm, name in norms:
        if norm is not None:
            found |= norm.parameters(name)
    if isinstance(block.mlp, MoE | ExpertParallelMoE):
        found |= _experts_parameters(block.mlp, names)
    else:
        found |= _mlp_parameters(block.mlp, names.mlp, names.gate_up, names.down)
    return {f"{names.layers}.{number}.{name}": each for name, each in found.items()}


def _attention_parameters(attention: Attention, names: TensorNames) -> dict[str, Parameter]:
    found = attention.qkv.parameters(names.qkv) | attention.output.parameters([names.output])
    if attention.q_norm is not None and attention.k_norm is not None:
        found |= attention.q_norm.parameters(names.q_norm)
        found |= attention.k_norm.parameters(names.k_norm)
    if attention.scores.sinks is not None:
        found[names.sinks] = parameter(attention, attention.scores.sinks)
    return found


def _latent_parameters(attention: LatentAttention, names: TensorNames) -> dict[str, Parameter]:
    query = names.qkv[0] if attention.query_up is None else names.query_down
    found = {
        **attention.down.parameters([query, names.row_down]),
        **attention.row_norm.parameters(names.row_norm),
        f"{names.row_up}.weight": parameter(attention, attention.up.flatten(0, 1)),
        **attention.output.parameters([names.output]),
    }
    if attention.query_up is not None and attention.query_norm is not None:
        found |= attention.query_norm.parameters(names.query_norm)
        found |= attention.query_up.parameters([names.query_up])
    return found


def _mlp_parameters(
    mlp: Mlp, prefix: str, gate_up: tuple[str, ...], down: str
) -> dict[str, Parameter]:
    return {
        **mlp.gate_up.parameters([f"{prefix}.{name}" for name in gate_up]),
        **mlp.down.parameters([f"{prefix}.{down}"]),
    }


def _experts_parameters(
    experts: MoE | ExpertParallelMoE, names: TensorNames
) -> dict[str, Parameter]:
    prefix = names.experts
    found = experts.router.parameters([f"{prefix}.{names.router}"])
    if experts.bias is not None:
        found[f"{prefix}.{names.router_bias}"] = parameter(experts.router, experts.bias)
    if experts.stacks is not None:
        for name, stack in experts.stacks.items():
            found[f"{prefix}.experts.{name}"] = parameter(experts, stack)
        return found
    first = 0
    if isinstance(experts, ExpertParallelMoE):
        first = experts.coord.experts(len(experts.load)).start
    for number, expert in enumerate(experts.experts, first):
        module_name = f"{prefix}.experts.{number}"
        found |= _mlp_parameters(expert, module_name, names.expert_gate_up, names.expert_down)
    if experts.shared is not None:
        module_name = f"{prefix}.{names.shared}"
        found |= _mlp_parameters(experts.shared.mlp, module_name, names.gate_up, names.down)
        if experts.shared.gate is not None:
            found |= experts.shared.gate.parameters([f"{prefix}.{names.shared_gate}"])
    return found
