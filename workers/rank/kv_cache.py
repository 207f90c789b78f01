"""The memory of one rank's KV cache, and the choice of its format."""

import math

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.kv_cache.format import FORMATS, KvCacheFormat, format_of
from penstock.kernels.triton_common.launch import runs_kernels
from penstock.workers.models.spec import ModelSpec


class KvCache:
    """Paged keys and values of all layers, indexed by the scheduler's block numbers.

    `data` is [num_layers, sides, num_blocks, heads, block_size, W], initially zero. `kv_shape` is
    (sides, heads, features): there are two sides (K and V), or one with MLA. W is the format's
    `slot_elements(features)`.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_shape: tuple[int, int, int],
        form: KvCacheFormat,
        device: torch.device,
    ) -> None:
        sides, heads, features = kv_shape
        slot = form.slot_elements(features)
        shape = (num_layers, sides, num_blocks, heads, block_size, slot)
        self.form = form
        self.data: Tensor = _zeros(shape, form.dtype, device)


def choose_cache_format(
    name: str, quantization: str, dtype: torch.dtype, device: torch.device
) -> KvCacheFormat:
    """Return the format of the KV cache of a model that runs in `dtype`.

    Args:
        name: "auto", "float32", "bfloat16", "fp8" or "int8". "auto" means `dtype`, except for
            float32 models with INT8 weights on a CPU: these get bfloat16, because reading a float32
            cache would dominate a step.

    Raises:
        ValueError: This combination is not supported.
    """
    # Triton kernels need floats of dtype `dtype`; the torch and numba kernels convert floats.
    narrows = dtype == torch.float32 and not runs_kernels(device)
    if name == "auto":
        return format_of(torch.bfloat16 if narrows and quantization == "int8" else dtype)
    chosen = FORMATS[name]
    converts = chosen.has_scales or (narrows and chosen.dtype == torch.bfloat16)
    if chosen.dtype != dtype and not converts:
        raise ValueError(
            f"kv_cache_dtype {name} is not available, because the model computes in "
            f"{str(dtype).removeprefix('torch.')} on {device.type}: set kv_cache_dtype to 'auto', "
            "'fp8' or 'int8' (or to 'bfloat16' for a float32 model on a CPU)"
        )
    return chosen


def check_cache_format(name: str, spec: ModelSpec) -> None:
    """Raise ValueError if the cache format `name` cannot store this model's keys and values.

    Args:
        name: a value of `kv_cache_dtype`. Only formats of 8-bit values with scales can be refused.
        spec: the model.
    """
    if name == "auto" or not FORMATS[name].has_scales:
        return
    if spec.latent is not None:
        reason = "multi-head latent attention, whose kernels read rows of floats"
    elif spec.extra_dim:
        reason = "rounded ALiBi biases (Falcon), which are in the cache and must stay exact"
    else:
        FORMATS[name].slot_elements(spec.head_dim)
        return
    raise ValueError(f"kv_cache_dtype {name} is not available for {reason}: set it to 'auto'")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Pages from np.zeros take memory only when they are written; torch.zeros writes all pages.
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
