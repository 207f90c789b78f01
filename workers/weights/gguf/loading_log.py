"""Logs how the weights of a GGUF file are stored in memory."""

import logging

import torch

from penstock.common.gguf.checkpoint import GgufCheckpoint
from penstock.common.gguf.tensor_types import BY_NAME
from penstock.workers.layers.packing import weight_form
from penstock.workers.weights.gguf.packed_blocks import PackedBlocks

log = logging.getLogger(__name__)

_MUCH_LARGER = 1.5
"""Ratio of bytes in memory to bytes in the file above which the log line is a warning."""


def log_loading(
    checkpoint: GgufCheckpoint, dtype: torch.dtype, quantization: str, packed: PackedBlocks
) -> None:
    """Log one line: the types of the file's weights, their form in memory, and both sizes.

    The line is a warning if the file is quantized and its weights need much more memory than the
    file's size suggests.
    """
    stored: dict[str, int] = {}
    num_items = 0
    for tensor in checkpoint.tensors.values():
        kind = tensor.type
        stored[kind.name] = stored.get(kind.name, 0) + tensor.num_bytes
        num_items += tensor.num_bytes // kind.block_bytes * kind.block_items
    is_quantized = any(BY_NAME[name].block_items > 1 for name in stored)
    float_bytes = (num_items - packed.num_items) * dtype.itemsize
    num_bytes, dtype_name = packed.num_bytes + float_bytes, str(dtype).removeprefix("torch.")
    if packed.num_items:
        form = (
            f"loaded as {num_bytes / 1e6:.1f} MB: {packed.num_bytes / 1e6:.1f} MB packed "
            f"({', '.join(packed.types)}), {float_bytes / 1e6:.1f} MB {dtype_name}"
        )
    else:
        verb = "dequantized and loaded" if is_quantized else "loaded"
        named = "" if weight_form(quantization) is None else quantization
        before = f", before quantization to {named}" if named else ""
        form = f"{verb} as {dtype_name}: {num_bytes / 1e6:.1f} MB{before}"
    is_much_larger = is_quantized and num_bytes > _MUCH_LARGER * sum(stored.values())
    log.log(
        logging.WARNING if is_much_larger else logging.INFO,
        "%s: %.1f MB of weights (%s) are %s",
        checkpoint.path.name,
        sum(stored.values()) / 1e6,
        ", ".join(sorted(stored, key=lambda name: -stored[name])),
        form,
    )
