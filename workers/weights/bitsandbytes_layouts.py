"""The tensors of modules that bitsandbytes quantized: LLM.int8, NF4 and FP4.

- LLM.int8: codes [N, K] and the largest |weight| of each output (`SCB`).
- NF4 and FP4: the weights of the whole matrix follow each other, row by row, two codes per byte,
  the first one in the upper bits. Each block of 64 weights has a scale (`absmax`). With double
  quantization, the scales have 8 bits: scale[i] = nested_quant_map[absmax[i]] *
  nested_absmax[i // 256] + offset. A JSON object, stored as bytes, has the offset and the sizes.

Sources: the serialisation of `bitsandbytes` (`QuantState.as_dict`, `Linear8bitLt`) and the papers
on LLM.int8 and QLoRA.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.linear.quantized import TABLES, Kind, QuantizedMatrix, even_groups
from penstock.workers.models.config import BadCheckpoint
from penstock.workers.weights.quantized_module import (
    QuantizedModule,
    StoredTensor,
    divided,
    group_cut,
)
from penstock.workers.weights.regions import Ranges, Region

MAX_STATE_BYTES = 4096
"""Largest size of the JSON object of a module; usual objects have about 200 bytes."""

_NESTED_BLOCK = 256  # number of scales that share one scale of the second level
_ROW_FORMAT = 0  # value of `weight_format` for plain rows; other values are layouts for older GPUs


def state_suffix(table: str) -> str:
    """Return the name suffix of the tensor that holds a module's quantization state as JSON."""
    return f"weight.quant_state.bitsandbytes__{table}"


def int8_tensors(
    module: QuantizedModule, rows: Ranges | None, columns: Ranges | None
) -> Iterator[StoredTensor]:
    """Yield the tensors of an LLM.int8 module; see `quantized_layouts.stored_tensors`."""
    shape = module.outputs, module.inputs
    yield StoredTensor("weight", shape, torch.int8, ("I8",), (rows, columns))
    yield StoredTensor("SCB", (module.outputs,), torch.float32, ("F32",), (rows,))
    if "weight_format" in module.optional:
        yield StoredTensor("weight_format", (1,), torch.uint8, ("U8",), alternatives=((),))


def read_int8(module: QuantizedModule, tensors: dict[str, Tensor]) -> QuantizedMatrix:
    """Return a rank's part of an LLM.int8 module. Raise BadCheckpoint unless stored by rows."""
    stored = tensors.pop("weight_format", None)
    if stored is not None and int(stored) != _ROW_FORMAT:
        raise BadCheckpoint(
            f"tensor {module.name}.weight_format is {int(stored)}: expected {_ROW_FORMAT}, weights "
            "stored by rows; save the checkpoint with a newer bitsandbytes"
        )
    codes = tensors.pop("weight").view(torch.uint8).bitwise_xor_(128)
    scales = tensors.pop("SCB")[:, None] / 127
    zeros = torch.full(scales.shape, 128, dtype=torch.uint8, device=codes.device)
    inputs = codes.shape[1]
    return QuantizedMatrix("int8", codes, scales, zeros, even_groups(inputs, inputs, codes.device))


def table_tensors(
    module: QuantizedModule, rows: Ranges | None, columns: Ranges | None
) -> Iterator[StoredTensor]:
    """Yield the tensors of an NF4 or FP4 module; see `quantized_layouts.stored_tensors`."""
    scheme = module.scheme
    per_row, groups = module.num_groups, group_cut(module, columns)
    pairs = divided(module, columns, 2, module.inputs, "inputs")
    region = _flat_region(rows, pairs, module.outputs, module.inputs // 2)
    shape: tuple[int, ...] = module.outputs * module.inputs // 2, 1
    yield StoredTensor("weight", shape, torch.uint8, ("U8",), region)
    region = _flat_region(rows, groups, module.outputs, per_row)
    dtype, accepted = (torch.uint8, "U8") if scheme.nested else (torch.float32, "F32")
    shape = (module.outputs * per_row,)
    yield StoredTensor("weight.absmax", shape, dtype, (accepted,), region)
    wide: dict[str, int] = {"weight.quant_map": 16}
    if scheme.nested:
        wide["weight.nested_absmax"] = -(-module.outputs * per_row // _NESTED_BLOCK)
        wide["weight.nested_quant_map"] = 256
    for suffix, size in wide.items():
        yield StoredTensor(suffix, (size,), torch.float32, ("F32",))
    suffix = state_suffix(scheme.table)
    size = math.prod(module.optional.get(suffix, (0,)))
    if size > MAX_STATE_BYTES:
        raise BadCheckpoint(
            f"tensor {module.name}.{suffix} has {size} bytes, but at most {MAX_STATE_BYTES} are "
            "allowed: download the checkpoint again"
        )
    yield StoredTensor(suffix, (size,), torch.uint8, ("U8",))


def _flat_region(rows: Ranges | None, columns: Ranges | None, num_rows: int, width: int) -> Region:
    """Convert ranges of rows and columns to a region of the flattened matrix [num_rows * width]."""
    if columns is None or columns == ((0, width),):
        if rows is None:
            return ()
        return (tuple((first * width, last * width) for first, last in rows),)
    starts = [row * width for span in rows or ((0, num_rows),) for row in range(*span)]
    return (tuple((at + first, at + last) for at in starts for first, last in columns),)


def read_table(
    module: QuantizedModule, tensors: dict[str, Tensor], region: Region
) -> QuantizedMatrix:
    """Return a rank's part of an NF4 or FP4 module; codes and scales are removed from `tensors`.

    Args:
        region: the rank's part of the weights [outputs, inputs].

    Raises:
        BadCheckpoint: The JSON object or the table of values does not fit the module.
    """
    state = _state(module, tensors)
    kind: Kind = "nf4" if module.scheme.table == "nf4" else "fp4"
    _check_table(module, tensors["weight.quant_map"], kind)
    rows, columns = (*region, None, None)[:2]
    outputs = module.outputs if rows is None else sum(last - first for first, last in rows)
    stored = tensors.pop("weight").view(outputs, -1)
    codes = (stored << 4) | (stored >> 4)
    scales = tensors.pop("weight.absmax")
    if module.scheme.nested:
        if not bool(tensors["weight.nested_quant_map"].isfinite().all()):
            raise BadCheckpoint(
                f"tensor {module.name}.weight.nested_quant_map has values that are NaN or "
                "infinite: expected finite numbers; download the checkpoint again"
            )
        groups = group_cut(module, columns)
        flat = _flat_region(rows, groups, module.outputs, module.num_groups)
        scales = _nested_scales(tensors, scales, flat, _offset(module, state))
    inputs = 2 * codes.shape[1]
    none = torch.zeros(outputs, 0, dtype=torch.uint8, device=codes.device)
    groups_of_inputs = even_groups(inputs, module.scheme.group_size, codes.device)
    return QuantizedMatrix(kind, codes, scales.view(outputs, -1), none, groups_of_inputs)


def _nested_scales(
    tensors: dict[str, Tensor], absmax: Tensor, flat: Region, offset: float
) -> Tensor:
    """Convert 8-bit scales to float32 (double quantization).

    `absmax` [n] has the scales of a rank, which are the region `flat` of the module's scales.
    """
    spans = flat[0] if flat and flat[0] is not None else ((0, len(absmax)),)
    numbers = torch.cat([torch.arange(*span, device=absmax.device) for span in spans])
    factors = tensors["weight.nested_absmax"][numbers // _NESTED_BLOCK]
    found = tensors["weight.nested_quant_map"][absmax.long()].mul_(factors)
    return found.add_(offset)


def _state(module: QuantizedModule, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the JSON object of a module, checked against the module's sizes."""
    suffix, scheme = state_suffix(module.scheme.table), module.scheme
    name = f"tensor {module.name}.{suffix}"
    try:
        state = json.loads(bytes(tensors[suffix].tolist()))
    except (ValueError, RecursionError):
        raise BadCheckpoint(
            f"{name} contains no valid JSON object: download the checkpoint again"
        ) from None
    if not isinstance(state, dict):
        raise BadCheckpoint(f"{name} contains no valid JSON object: download the checkpoint again")
    expected = {
        "quant_type": scheme.table,
        "blocksize": scheme.group_size,
        "shape": [module.outputs, module.inputs],
    }
    if scheme.nested:
        expected["nested_blocksize"] = _NESTED_BLOCK
    for key, value in expected.items():
        if state.get(key) != value:
            raise BadCheckpoint(f"{name}: {key} is {state.get(key)!r:.80}, expected {value!r}")
    return state


def _offset(module: QuantizedModule, state: dict[str, Any]) -> float:
    value: Any = state.get("nested_offset")
    if type(value) not in (int, float) or not math.isfinite(value):
        raise BadCheckpoint(
            f"tensor {module.name}.{state_suffix(module.scheme.table)}: nested_offset is "
            f"{value!r:.80}, expected a finite number"
        )
    return float(value)


def _check_table(module: QuantizedModule, found: Tensor, kind: Kind) -> None:
    expected = torch.tensor(TABLES[kind], dtype=torch.float32, device=found.device)
    if not torch.allclose(found, expected, rtol=0, atol=1e-6):
        raise BadCheckpoint(
            f"tensor {module.name}.weight.quant_map does not contain the 16 values of {kind}"
        )
