"""Maps the tensor names of a checkpoint to views of the weights into which they are loaded."""

from torch import Tensor

from penstock.workers.layers.attention import Attention
from penstock.workers.layers.decoder_layer import DecoderLayer
from penstock.workers.layers.expert_parallel import ExpertParallelMoE
from penstock.workers.layers.mla import LatentAttention
from penstock.workers.layers.mlp import Mlp
from penstock.workers.layers.moe import MoE
from penstock.workers.models.tensor_names import TensorNames


def layer_tensors(block: DecoderLayer, names: TensorNames, number: int) -> dict[str, Tensor]:
    """Return views of one layer's weights by the full names of the tensors in the checkpoint."""
    if isinstance(block.attention, LatentAttention):
        found = _latent_tensors(block.attention, names)
    else:
        found = _attention_tensors(block.attention, names)
    norms = (
        (block.attention_norm, names.attention_norm),
        (block.attention_post_norm, names.attention_post_norm),
        (block.mlp_norm, names.mlp_norm),
        (block.mlp_post_norm, names.mlp_post_norm),
    )
    for norm, name in norms:
        if norm is not None:
            found |= norm.tensors(name)
    if isinstance(block.mlp, MoE | ExpertParallelMoE):
        found |= _experts_tensors(block.mlp, names)
    else:
        found |= _mlp_tensors(block.mlp, names.mlp, names.gate_up, names.down)
    return {f"{names.layers}.{number}.{name}": tensor for name, tensor in found.items()}


def _attention_tensors(attention: Attention, names: TensorNames) -> dict[str, Tensor]:
    found = attention.qkv.tensors(names.qkv) | attention.output.tensors([names.output])
    if attention.q_norm is not None and attention.k_norm is not None:
        found |= attention.q_norm.tensors(names.q_norm)
        found |= attention.k_norm.tensors(names.k_norm)
    if attention.scores.sinks is not None:
        found[names.sinks] = attention.scores.sinks
    return found


def _latent_tensors(attention: LatentAttention, names: TensorNames) -> dict[str, Tensor]:
    query = names.qkv[0] if attention.query_up is None else names.query_down
    found = {
        **attention.down.tensors([query, names.row_down]),
        **attention.row_norm.tensors(names.row_norm),
        f"{names.row_up}.weight": attention.up.flatten(0, 1),
        **attention.output.tensors([names.output]),
    }
    if attention.query_up is not None and attention.query_norm is not None:
        found |= attention.query_norm.tensors(names.query_norm)
        found |= attention.query_up.tensors([names.query_up])
    return found


def _mlp_tensors(mlp: Mlp, prefix: str, gate_up: tuple[str, ...], down: str) -> dict[str, Tensor]:
    return {
        **mlp.gate_up.tensors([f"{prefix}.{name}" for name in gate_up]),
        **mlp.down.tensors([f"{prefix}.{down}"]),
    }


def _experts_tensors(experts: MoE | ExpertParallelMoE, names: TensorNames) -> dict[str, Tensor]:
    prefix = names.experts
    found = experts.router.tensors([f"{prefix}.{names.router}"])
    if experts.bias is not None:
        found[f"{prefix}.{names.router_bias}"] = experts.bias
    if experts.stacks is not None:
        stacks = experts.stacks.items()
        return found | {f"{prefix}.experts.{name}": tensor for name, tensor in stacks}
    first = 0
    if isinstance(experts, ExpertParallelMoE):
        first = experts.coord.experts(len(experts.load)).start
    for number, expert in enumerate(experts.experts, first):
        module_name = f"{prefix}.experts.{number}"
        found |= _mlp_tensors(expert, module_name, names.expert_gate_up, names.expert_down)
    if experts.shared is not None:
        module_name = f"{prefix}.{names.shared}"
        found |= _mlp_tensors(experts.shared.mlp, module_name, names.gate_up, names.down)
        if experts.shared.gate is not None:
            found |= experts.shared.gate.tensors([f"{prefix}.{names.shared_gate}"])
    return found
