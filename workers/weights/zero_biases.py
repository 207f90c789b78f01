"""Biases of zeros that GPTQ checkpoints contain for layers without a bias."""

from collections.abc import Mapping

import torch

from penstock.workers.layers.parameter import FLOATS
from penstock.workers.models.config import BadCheckpoint
from penstock.workers.weights.quantized_module import QuantizedModule
from penstock.workers.weights.safetensors import STORED_DTYPES
from penstock.workers.weights.tensor_entry import TensorEntry


def is_zero_bias(name: str, entry: TensorEntry, modules: Mapping[str, QuantizedModule]) -> bool:
    """Return True if a tensor that the model lacks is a bias of zeros of a GPTQ module.

    Older versions of AutoGPTQ store such a bias for every quantized module. The bias is read,
    because a checkpoint with other values cannot be served without it.

    Args:
        name: Name of the tensor.
        entry: The tensor in the checkpoint.
        modules: The quantized modules by name.

    Raises:
        BadCheckpoint: The bias of a GPTQ module is not zero.
    """
    module = modules.get(name.removesuffix(".bias")) if name.endswith(".bias") else None
    if module is None or module.scheme.storage != "gptq":
        return False
    if entry.dtype not in FLOATS or entry.shape != (module.outputs,):
        return False
    bias = torch.empty(entry.shape, dtype=STORED_DTYPES[entry.dtype])
    with entry.path.open("rb") as file:
        entry.load(bias, file, lambda num_bytes: None)
    if bias.count_nonzero():
        raise BadCheckpoint(
            f"{entry.path}: tensor {entry.stored_name} has values other than zero, but "
            "config.json describes a model without this bias: weights and configuration do not "
            "belong together"
        )
    return True
