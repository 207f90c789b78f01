"""The tensors of MXFP4 and NVFP4 modules: e2m1 codes, and scales of blocks of inputs.

- MXFP4: blocks of 32 inputs, scales 2^(byte - 127) (e8m0).
- NVFP4: blocks of 16 inputs, scales in FP8 (e4m3), and one float32 scale for the whole module.
  ModelOpt stores that scale as a factor (`weight_scale_2`), compressed-tensors as a divisor
  (`weight_global_scale`).

Sources: the OCP Microscaling Formats specification 1.0, and the checkpoints of gpt-oss, ModelOpt
and compressed-tensors.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.linear.quantized import QuantizedMatrix, even_groups
from penstock.workers.models.config import BadCheckpoint
from penstock.workers.weights.quantized_module import (
    QuantizedModule,
    StoredTensor,
    divided,
    group_cut,
)
from penstock.workers.weights.regions import Ranges

E8M0_NAN = 255
"""Byte value that represents NaN in e8m0."""

_GLOBAL_SCALES = {"nvfp4": "weight_global_scale", "modelopt nvfp4": "weight_scale_2"}


def fp4_tensors(
    module: QuantizedModule, rows: Ranges | None, columns: Ranges | None
) -> Iterator[StoredTensor]:
    """Yield the tensors of a module; see `quantized_layouts.stored_tensors`."""
    storage = module.scheme.storage
    groups = group_cut(module, columns)
    pairs = divided(module, columns, 2, module.inputs, "inputs")
    shape = module.outputs, module.inputs // 2
    yield StoredTensor(_codes_name(module), shape, torch.uint8, ("U8",), (rows, pairs))
    is_e8m0 = storage == "mxfp4"
    dtype, accepted = (torch.uint8, "U8") if is_e8m0 else (torch.float8_e4m3fn, "F8_E4M3")
    shape = module.outputs, module.num_groups
    yield StoredTensor("weight_scale", shape, dtype, (accepted,), (rows, groups))
    if storage in _GLOBAL_SCALES:
        yield StoredTensor(
            _GLOBAL_SCALES[storage], (1,), torch.float32, ("F32",), alternatives=((),)
        )  # fmt: skip


def _codes_name(module: QuantizedModule) -> str:
    return "weight" if module.scheme.storage == "modelopt nvfp4" else "weight_packed"


def read_fp4(module: QuantizedModule, tensors: dict[str, Tensor]) -> QuantizedMatrix:
    """Return a rank's part of a module; the tensors are removed from the dictionary.

    Raises:
        BadCheckpoint: A block's scale is NaN, or the module's scale is not finite or out of range.
    """
    codes = tensors.pop(_codes_name(module))
    scales, storage = tensors.pop("weight_scale"), module.scheme.storage
    name = f"{module.name}.weight_scale"
    if storage == "mxfp4":
        return e2m1_matrix(codes, e8m0_scales(name, scales), module.scheme.group_size)
    wide = scales.to(torch.float32)
    if bool(wide.isnan().any()):
        raise BadCheckpoint(f"tensor {name} contains NaN: expected numbers as scales")
    factor = _global_scale(module, tensors)
    # Divide instead of multiplying by a reciprocal, so that the result is rounded only once.
    wide = wide.div_(factor) if storage == "nvfp4" else wide.mul_(factor)
    return e2m1_matrix(codes, wide, module.scheme.group_size)


def _global_scale(module: QuantizedModule, tensors: dict[str, Tensor]) -> Tensor:
    suffix = _GLOBAL_SCALES[module.scheme.storage]
    value = float(tensors[suffix])
    least = "above 0" if module.scheme.storage == "nvfp4" else "of at least 0"
    if not (math.isfinite(value) and (value > 0 or (value == 0 and least == "of at least 0"))):
        raise BadCheckpoint(
            f"tensor {module.name}.{suffix} is {value}: expected a finite number {least}"
        )
    return tensors.pop(suffix)


def e8m0_scales(name: str, scales: Tensor) -> Tensor:
    """Convert e8m0 scales (uint8) to float32: 2^(byte - 127), exactly.

    Args:
        name: the tensor's name, for the error message.

    Raises:
        BadCheckpoint: A scale is 255, which stands for NaN.
    """
    if scales.numel() and int(scales.max()) == E8M0_NAN:
        raise BadCheckpoint(f"tensor {name} has the scale byte {E8M0_NAN} (NaN): expected 0 to 254")
    bits = scales.to(torch.int32) << 23
    # Byte 0 means 2^-127, a subnormal float32 number with the bits 1 << 22.
    return bits.masked_fill_(bits == 0, 1 << 22).view(torch.float32)


def e2m1_matrix(codes: Tensor, scales: Tensor, block: int) -> QuantizedMatrix:
    """Return the matrix of codes [N, K / 2] uint8 and scales [N, K / block] float32."""
    zeros = torch.zeros(len(codes), 0, dtype=torch.uint8, device=codes.device)
    groups = even_groups(2 * codes.shape[1], block, codes.device)
    return QuantizedMatrix("e2m1", codes, scales, zeros, groups)
