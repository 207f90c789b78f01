"""The tensors of quantized modules: their names, shapes, division among ranks and codes.

Sources of the layouts: the packing functions of AutoGPTQ, AutoAWQ and compressed-tensors, and the
checkpoints of DeepSeek V3.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from penstock.kernels.checks import E4M3_MAX
from penstock.kernels.linear.quantize_rows import MIN_SCALE, QMAX
from penstock.kernels.linear.quantized import Kind, QuantizedMatrix, even_groups
from penstock.workers.layers.parameter import FLOATS
from penstock.workers.models.config import BadCheckpoint, UnsupportedModel
from penstock.workers.models.weight_scheme import WeightScheme
from penstock.workers.weights.bitsandbytes_layouts import (
    int8_tensors,
    read_int8,
    read_table,
    table_tensors,
)
from penstock.workers.weights.fp4_layouts import fp4_tensors, read_fp4
from penstock.workers.weights.quantized_module import (
    QuantizedModule,
    StoredTensor,
    divided,
    group_cut,
)
from penstock.workers.weights.regions import Ranges, Region

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Item i: the column (of eight) that AWQ stores in bits 4 i to 4 i + 3 of a word."""

_ROWS_AT_ONCE = 512  # rows unpacked in one call; bounds the memory for unpacked codes of AWQ


def check_module(module: QuantizedModule) -> None:
    """Raise `BadCheckpoint` or `UnsupportedModel` if sizes are not multiples of groups or words."""
    scheme, name = module.scheme, module.name
    size = scheme.group_size
    if scheme.storage.startswith("bitsandbytes") and size > 0 and module.inputs % size:
        raise UnsupportedModel(
            f"{name} has {module.inputs} inputs: expected a multiple of {size}, because blocks of "
            "bitsandbytes that contain parts of two rows are not supported"
        )
    if scheme.block_rows == 1 and size > 0 and module.inputs % size:
        raise BadCheckpoint(
            f"{name} has {module.inputs} inputs: expected a multiple of {size}, the group size in "
            "quantization_config; weights and config.json do not belong together"
        )
    word = module.per_word
    packed_inputs = scheme.storage in ("packed", "gptq")
    if packed_inputs and module.inputs % word:
        raise BadCheckpoint(
            f"{name} has {module.inputs} inputs: expected a multiple of {word}, because a 32-bit "
            f"word packs {word} codes"
        )
    pairs = scheme.storage in ("awq", "mxfp4", "nvfp4", "modelopt nvfp4", "bitsandbytes 4 bits")
    if pairs and module.inputs % 2:
        raise BadCheckpoint(
            f"{name} has {module.inputs} inputs, an odd number: 4-bit codes are stored in pairs"
        )
    packed_outputs = scheme.storage in ("gptq", "awq")
    if packed_outputs and module.outputs % word:
        packed = "codes" if scheme.storage == "awq" else "zero points"
        raise BadCheckpoint(
            f"{name} has {module.outputs} outputs: expected a multiple of {word}, because a 32-bit "
            f"word packs {word} {packed}"
        )


def stored_tensors(module: QuantizedModule, region: Region) -> Iterator[StoredTensor]:
    """Yield the tensors of a module.

    Args:
        region: the rank's part of the weights [outputs, inputs].

    Raises:
        BadShape: The region cuts a group, a block or a word.
    """
    rows, columns = (*region, None, None)[:2]
    match module.scheme.storage:
        case "fp8":
            yield StoredTensor(
                "weight", (module.outputs, module.inputs), torch.float8_e4m3fn, ("F8_E4M3",),
                (rows, columns),
            )  # fmt: skip
            yield from _row_scales(module, rows, columns)
        case "int8":
            yield StoredTensor(
                "weight", (module.outputs, module.inputs), torch.int8, ("I8",), (rows, columns)
            )
            yield from _row_scales(module, rows, columns)
            if not module.scheme.symmetric:
                yield from _row_zeros(module, rows, columns)
        case "packed":
            yield from _packed(module, rows, columns)
        case "gptq" | "awq":
            yield from _by_inputs(module, rows, columns)
        case "mxfp4" | "nvfp4" | "modelopt nvfp4":
            yield from fp4_tensors(module, rows, columns)
        case "bitsandbytes int8":
            yield from int8_tensors(module, rows, columns)
        case "bitsandbytes 4 bits":
            yield from table_tensors(module, rows, columns)
    if module.scheme.input_scale:
        yield StoredTensor(module.scheme.input_scale, (1,), torch.float32, FLOATS, (), ((), (1, 1)))


def _row_scales(
    module: QuantizedModule, rows: Ranges | None, columns: Ranges | None
) -> Iterator[StoredTensor]:
    shape, region, alternatives = _scale_shape(module, rows, columns)
    yield StoredTensor(
        module.scheme.scale_name, shape, torch.float32, FLOATS, region, alternatives
    )  # fmt: skip


def _row_zeros(
    module: QuantizedModule, rows: Ranges | None, columns: Ranges | None
) -> Iterator[StoredTensor]:
    shape, region, alternatives = _scale_shape(module, rows, columns)
    yield StoredTensor("weight_zero_point", shape, torch.int8, ("I8",), region, alternatives)


def _scale_shape(
    module: QuantizedModule, rows: Ranges | None, columns: Ranges | None
) -> tuple[tuple[int, ...], Region, tuple[tuple[int, ...], ...]]:
    scheme, outputs = module.scheme, module.outputs
    if scheme.per_tensor:
        return (1,), (), ((),)
    groups = group_cut(module, columns)
    if scheme.block_rows > 1:
        blocks = divided(module, rows, scheme.block_rows, outputs, "outputs")
        return (-(-outputs // scheme.block_rows), module.num_groups), (blocks, groups), ()
    flat: tuple[tuple[int, ...], ...] = ((outputs,),) if module.num_groups == 1 else ()
    return (outputs, module.num_groups), (rows, groups), flat


def _packed(
    module: QuantizedModule, rows: Ranges | None, columns: Ranges | None
) -> Iterator[StoredTensor]:
    word = module.per_word
    words = divided(module, columns, word, module.inputs, "inputs")
    shape = module.outputs, module.inputs // word
    yield StoredTensor("weight_packed", shape, torch.int32, ("I32",), (rows, words))
    yield from _row_scales(module, rows, columns)
    if not module.scheme.symmetric:
        words = divided(module, rows, word, module.outputs, "outputs")
        shape = -(-module.outputs // word), module.num_groups
        region = words, group_cut(module, columns)
        yield StoredTensor("weight_zero_point", shape, torch.int32, ("I32",), region)
    if module.has_group_table:
        yield _group_table(module, "weight_g_idx", columns)


def _by_inputs(
    module: QuantizedModule, rows: Ranges | None, columns: Ranges | None
) -> Iterator[StoredTensor]:
    """Yield the tensors of GPTQ and AWQ; their first dimension is inputs or groups of inputs."""
    word, groups = module.per_word, group_cut(module, columns)
    row_words = divided(module, rows, word, module.outputs, "outputs")
    if module.scheme.storage == "gptq":
        words = divided(module, columns, word, module.inputs, "inputs")
        shape, region = (module.inputs // word, module.outputs), (words, rows)
    else:
        shape, region = (module.inputs, module.outputs // word), (columns, row_words)
    yield StoredTensor("qweight", shape, torch.int32, ("I32",), region)
    shape = module.num_groups, module.outputs // word
    yield StoredTensor("qzeros", shape, torch.int32, ("I32",), (groups, row_words))
    shape = module.num_groups, module.outputs
    yield StoredTensor("scales", shape, torch.float32, FLOATS, (groups, rows))
    if module.has_group_table:
        yield _group_table(module, "g_idx", columns)


def _group_table(module: QuantizedModule, suffix: str, columns: Ranges | None) -> StoredTensor:
    return StoredTensor(suffix, (module.inputs,), torch.int32, ("I32",), (columns,))


def read_input_limit(module: QuantizedModule, tensors: Mapping[str, Tensor]) -> float:
    """Return the largest magnitude of an activation with the module's static scale.

    Return 0 if there is no scale, or if the scale is not a positive finite number. Calibration
    leaves such scales for experts that no calibration token has chosen.
    """
    scheme = module.scheme
    if not scheme.input_scale:
        return 0.0
    limit = float(tensors[scheme.input_scale])
    limit *= E4M3_MAX if scheme.activations == "fp8" else QMAX
    return limit if MIN_SCALE < limit < torch.finfo(torch.float32).max else 0.0


def read_matrix(
    module: QuantizedModule, tensors: dict[str, Tensor], region: Region = ()
) -> QuantizedMatrix:
    """Return the codes and scales of a rank's part of a module.

    Args:
        tensors: the loaded tensors of `stored_tensors`, by suffix; the codes are removed.
        region: the rank's part of the weights [outputs, inputs].

    Raises:
        BadCheckpoint: The tensors contradict the module or each other, or a scale is not finite.
    """
    matrix = _read(module, tensors, region)
    num_wrong = matrix.scales.numel() - int(matrix.scales.isfinite().count_nonzero())
    if num_wrong:
        raise BadCheckpoint(
            f"tensor {module.name}.{_scales_suffix(module.scheme)} makes {num_wrong} of "
            f"{matrix.scales.numel()} scales NaN or infinite: expected finite numbers; download "
            "the checkpoint again"
        )
    return matrix


def _scales_suffix(scheme: WeightScheme) -> str:
    """Return the suffix of the tensor that has the scales."""
    match scheme.storage:
        case "gptq" | "awq":
            return "scales"
        case "bitsandbytes int8":
            return "SCB"
        case "bitsandbytes 4 bits":
            return "weight.nested_absmax" if scheme.nested else "weight.absmax"
    return scheme.scale_name


def _read(module: QuantizedModule, tensors: dict[str, Tensor], region: Region) -> QuantizedMatrix:
    match module.scheme.storage:
        case "mxfp4" | "nvfp4" | "modelopt nvfp4":
            return read_fp4(module, tensors)
        case "bitsandbytes int8":
            return read_int8(module, tensors)
        case "bitsandbytes 4 bits":
            return read_table(module, tensors, region)
        case "fp8":
            codes = tensors.pop("weight").view(torch.uint8)
        case "int8":
            codes = tensors.pop("weight").view(torch.uint8).bitwise_xor_(128)
        case "packed":
            codes = tensors.pop("weight_packed").view(torch.uint8)
        case "gptq":
            codes = tensors.pop("qweight").T.contiguous().view(torch.uint8)
        case "awq":
            codes = _awq_codes(tensors.pop("qweight"))
    is_wide = module.scheme.bits == 8
    outputs, inputs = len(codes), codes.shape[1] if is_wide else 2 * codes.shape[1]
    scales = _scales(module, tensors, outputs)
    kind: Kind = "fp8" if module.scheme.storage == "fp8" else "int8" if is_wide else "int4"
    zeros = _zeros(module, tensors, scales)
    return QuantizedMatrix(kind, codes, scales, zeros, _groups(module, tensors, inputs, codes))


def _groups(
    module: QuantizedModule, tensors: Mapping[str, Tensor], inputs: int, codes: Tensor
) -> Tensor:
    if not module.has_group_table:
        size = module.scheme.group_size if module.num_groups > 1 else inputs
        return even_groups(inputs, size, codes.device)
    suffix = "weight_g_idx" if module.scheme.storage == "packed" else "g_idx"
    table = tensors[suffix]
    if int(table.min()) < 0 or int(table.max()) >= module.num_groups:
        raise BadCheckpoint(
            f"tensor {module.name}.{suffix} has group numbers from {int(table.min())} to "
            f"{int(table.max())}: expected 0 to {module.num_groups - 1}"
        )
    return table


def _scales(module: QuantizedModule, tensors: Mapping[str, Tensor], outputs: int) -> Tensor:
    scheme = module.scheme
    values = tensors[_scales_suffix(scheme)]
    if scheme.storage in ("gptq", "awq"):
        return values.T.contiguous()
    return _per_row(scheme, values, outputs)


def _per_row(scheme: WeightScheme, values: Tensor, outputs: int) -> Tensor:
    """Expand values per tensor or per block of outputs to one row of values per output."""
    if scheme.per_tensor:
        return values.view(1, 1).repeat(outputs, 1)
    return values.repeat_interleave(scheme.block_rows, 0)[:outputs].contiguous()


def _zeros(module: QuantizedModule, tensors: Mapping[str, Tensor], scales: Tensor) -> Tensor:
    scheme = module.scheme
    if scheme.storage == "fp8":
        return torch.zeros(len(scales), 0, dtype=torch.uint8, device=scales.device)
    if scheme.storage == "awq":
        return _awq_nibbles(tensors["qzeros"]).T.contiguous()
    if scheme.storage == "gptq":
        # The format "gptq" stores (zero point - 1) modulo the number of codes, so its `zero_offset`
        # is 1.
        stored = _unpacked(tensors["qzeros"], scheme.bits).T.contiguous()
        return stored.add_(scheme.zero_offset).bitwise_and_(2**scheme.bits - 1)
    if scheme.symmetric:
        return torch.full(
            scales.shape, 2 ** (scheme.bits - 1), dtype=torch.uint8, device=scales.device
        )
    stored = tensors["weight_zero_point"]
    if scheme.storage == "packed":
        return _unpacked(stored.T.contiguous(), scheme.bits).T[: len(scales)].contiguous()
    return _per_row(scheme, stored.view(torch.uint8) ^ 128, len(scales))


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the codes [R, C * 32 / bits] uint8 of words [R, C], lowest bits first."""
    codes = words.contiguous().view(torch.uint8)
    if bits == 8:
        return codes
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1)


def _awq_nibbles(words: Tensor) -> Tensor:
    """Return the codes [R, 8 C] uint8 of words [R, C] in AWQ's order."""
    found = torch.empty(len(words), words.shape[1], 8, dtype=torch.uint8, device=words.device)
    for position, column in enumerate(_AWQ_ORDER):
        found[:, :, column] = (words >> 4 * position) & 15
    return found.flatten(1)


def _awq_codes(words: Tensor) -> Tensor:
    """Convert words [inputs, outputs / 8] to codes [outputs, inputs / 2] of `QuantizedMatrix`.

    The number of inputs must be even.
    """
    codes = torch.empty(
        8 * words.shape[1], len(words) // 2, dtype=torch.uint8, device=words.device
    )  # fmt: skip
    for first in range(0, len(words), _ROWS_AT_ONCE):
        found = _awq_nibbles(words[first : first + _ROWS_AT_ONCE])
        packed = found[0::2] | (found[1::2] << 4)
        codes[:, first // 2 : first // 2 + len(packed)] = packed.T
    return codes
