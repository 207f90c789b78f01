"""Linear method for quantized checkpoints, and the choice of the layers that use it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial

import torch
from torch import Tensor

from penstock.kernels.linear.cpu_packed_int4 import divides_blocks
from penstock.kernels.linear.op import int8_unsupported_reason, pack_int8_matrix
from penstock.kernels.linear.quantized import (
    QuantizedMatrix,
    concatenate,
    has_int4_products,
    pack_quantized,
)
from penstock.kernels.linear.w8a8 import has_w8a8_products, pack_w8a8
from penstock.workers.layers.linear import Linear, PackingOptions
from penstock.workers.layers.parameter import FLOATS, Parameter
from penstock.workers.models.config import UnsupportedModel
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.weight_scheme import INPUT_SCALES, QuantizationSpec, WeightScheme
from penstock.workers.weights.bitsandbytes_layouts import state_suffix
from penstock.workers.weights.mxfp4_stacks import check_mxfp4_stack, mxfp4_stack_method
from penstock.workers.weights.quantized_layouts import (
    check_module,
    read_input_limit,
    read_matrix,
    stored_tensors,
)
from penstock.workers.weights.quantized_module import QuantizedModule
from penstock.workers.weights.regions import Region
from penstock.workers.weights.sharding import region_shape
from penstock.workers.weights.tensor_entry import TensorEntry

log = logging.getLogger(__name__)


@dataclass(slots=True)
class QuantizedMethod:
    """Method of one `Linear` whose modules are quantized in the checkpoint.

    Checkpoints with INT8 or FP8 activations use a product of quantized activations, if the device
    has one for their weights. The scales of activations are static if the checkpoint has static
    scales; otherwise they are computed at run time. Fused modules use the largest of their static
    scales, as in vLLM. Each expert has its own scale. All other products are weight-only:
    activations are not quantized.
    """

    modules: tuple[QuantizedModule, ...]
    regions: Mapping[str, Region]  # regions that this rank holds, by names "MODULE.weight"
    _loaded: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.modules[0].scheme.name

    def parameters(self, linear: Linear, names: Sequence[str]) -> dict[str, Parameter]:
        self._loaded = [{} for _ in self.modules]
        device = linear.device or linear.weight.device
        found = {}
        for module, tensors in zip(self.modules, self._loaded, strict=True):
            region = self.regions.get(f"{module.name}.weight", ())
            for each in stored_tensors(module, region):
                shape = region_shape(each.shape, each.region)
                allocate = partial(_allocate, tensors, each.suffix, shape, each.dtype, device)
                found[f"{module.name}.{each.suffix}"] = Parameter(
                    linear, shape, each.dtype, allocate, each.accepts, each.region,
                    each.alternatives,
                )  # fmt: skip
        return found | linear.bias_parameters(names, linear.module_sizes(names))

    def finish(self, linear: Linear, packing: PackingOptions) -> None:
        modules = zip(self.modules, self._loaded, strict=True)
        limit = max(read_input_limit(module, tensors) for module, tensors in modules)
        if not limit and self.modules[0].scheme.input_scale:
            _warn_of_unusable_scale(self.modules[0].scheme)
        matrix = self._matrix(linear)
        dtype, inputs = linear.weight.dtype, linear.weight.shape[1]
        if self._uses_int8_product(matrix, dtype):
            linear.packed = pack_int8_matrix(matrix, linear.bias, limit)
        else:
            # `quantized_modules` refuses fused modules with different schemes.
            activations = self.modules[0].scheme.activations
            linear.packed = pack_w8a8(matrix, linear.bias, activations, limit) or pack_quantized(
                matrix, linear.bias, dtype, int8_activations=activations == "int8"
            )
        linear.weight = torch.empty(0, inputs, dtype=dtype, device=matrix.codes.device)

    def finish_dense(self, linear: Linear) -> None:
        linear.weight = self._matrix(linear).dequantize().to(linear.weight.dtype)

    def _matrix(self, linear: Linear) -> QuantizedMatrix:
        """Return the fused matrix; free the loaded tensors."""
        matrices = []
        for module, tensors in zip(self.modules, self._loaded, strict=True):
            region = self.regions.get(f"{module.name}.weight", ())
            matrices.append(read_matrix(module, tensors, region))
            tensors.clear()
        try:
            matrix = concatenate(matrices)
        except ValueError as error:
            names = ", ".join(module.name for module in self.modules)
            raise UnsupportedModel(f"{names}: {error}") from None
        if linear.row_order is not None:
            matrix = matrix.take_rows(linear.row_order)
            linear.bias = None if linear.bias is None else linear.bias[linear.row_order]
            linear.row_order = None
        return matrix

    def _uses_int8_product(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> bool:
        return (
            matrix.kind == "int8"
            and self.modules[0].scheme.allows_int8_products
            and matrix.scales.shape[1] == 1
            and not int8_unsupported_reason(matrix.codes.device, dtype)
        )


def _allocate(
    tensors: dict[str, Tensor], suffix: str, shape: tuple[int, ...], dtype: torch.dtype,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Return the memory for a tensor of the checkpoint; allocate it at the first call."""
    if suffix not in tensors:
        tensors[suffix] = torch.empty(shape, dtype=dtype, device=device)
    return tensors[suffix]


def quantized_modules(
    spec: QuantizationSpec | None, whole: Decoder, entries: Mapping[str, TensorEntry]
) -> dict[str, QuantizedModule]:
    """Return the quantized modules of a checkpoint by name.

    A module whose `weight` in the checkpoint is a float matrix is not quantized, even if the
    configuration does not exclude it. This is common for heads and MoE routers.

    Args:
        whole: the decoder of the whole model, on the `meta` device.
        entries: the tensors of the checkpoint.

    Raises:
        BadCheckpoint: Groups or words do not divide the sizes of a module.
        UnsupportedModel: Fused modules have different schemes, or a module's layout is unsupported.
    """
    found: dict[str, QuantizedModule] = {}
    if spec is None:
        return found
    for names, linear in whole.linears():
        sizes = linear.module_sizes(names)
        schemes = [_scheme_of(spec, name, entries) for name in names]
        if len(set(schemes)) > 1:
            schemes = [_with_dynamic_scales(scheme) for scheme in schemes]
        for other, scheme in zip(names, schemes, strict=True):
            if scheme != schemes[0]:
                raise UnsupportedModel(
                    f"{names[0]} is {_described(schemes[0])}, but {other} is {_described(scheme)}"
                    f"{_unnamed_difference(schemes[0], scheme)}: "
                    "modules that are fused into one matrix must have the same quantization"
                )
        for name, size, scheme in zip(names, sizes, schemes, strict=True):
            if scheme is not None:
                table = "weight_g_idx" if scheme.storage == "packed" else "g_idx"
                has_table = scheme.act_order or f"{name}.{table}" in entries
                inputs = linear.weight.shape[1]
                optional = _optional(name, scheme, entries)
                found[name] = QuantizedModule(name, scheme, size, inputs, has_table, optional)
                check_module(found[name])
    if spec.method == "mxfp4":
        found |= _mxfp4_stacks(spec, whole)
    return found


def _mxfp4_stacks(spec: QuantizationSpec, whole: Decoder) -> dict[str, QuantizedModule]:
    """Return the stacks of gpt-oss by name, each as a `QuantizedModule` of one expert."""
    found = {}
    for name, stack in whole.stacks():
        scheme = spec.scheme_of(name)
        if scheme is None:
            raise UnsupportedModel(
                f"{name} is excluded from mxfp4 (modules_to_not_convert): expected all experts in "
                "mxfp4"
            )
        outputs, inputs = stack.linears[0].weight.shape
        found[name] = QuantizedModule(name, scheme, outputs, inputs, has_group_table=False)
        check_mxfp4_stack(found[name])
    return found


def _optional(
    module: str, scheme: WeightScheme, entries: Mapping[str, TensorEntry]
) -> dict[str, tuple[int, ...]]:
    """Return the module's `QuantizedModule.optional`: shapes of optional tensors, by suffix."""
    suffixes = {
        "bitsandbytes int8": "weight_format",
        "bitsandbytes 4 bits": state_suffix(scheme.table),
    }
    suffix = suffixes.get(scheme.storage)
    entry = entries.get(f"{module}.{suffix}")
    return {} if suffix is None or entry is None else {suffix: entry.shape}


def _unnamed_difference(one: WeightScheme | None, other: WeightScheme | None) -> str:
    """Return the fields in which two schemes differ, if their names do not show the difference."""
    if one is None or other is None or one.name != other.name:
        return ""
    names = [each.name for each in fields(one)]
    differing = [name for name in names if getattr(one, name) != getattr(other, name)]
    return f" with another {' and '.join(differing)}"


def _described(scheme: WeightScheme | None) -> str:
    return "not quantized" if scheme is None else scheme.name


def _scheme_of(
    spec: QuantizationSpec, module: str, entries: Mapping[str, TensorEntry]
) -> WeightScheme | None:
    scheme = spec.scheme_of(module)
    weight = entries.get(f"{module}.weight")
    if scheme is None or (weight is not None and weight.dtype in FLOATS):
        return None
    if scheme.per_tensor and f"{module}.weight_scale_inv" in entries:
        scheme = replace(scheme, scale_name="weight_scale_inv")
    if scheme.input_scale:
        stored = {suffix: entries.get(f"{module}.{suffix}") for suffix in INPUT_SCALES}
        # Calibration leaves out the tensor, or makes it empty, if no token has used the module.
        found = [suffix for suffix, entry in stored.items() if entry and 0 not in entry.shape]
        scheme = replace(scheme, input_scale=found[0] if found else "")
    return scheme


def _with_dynamic_scales(scheme: WeightScheme | None) -> WeightScheme | None:
    return scheme and replace(scheme, input_scale="")


@cache
def _warn_of_unusable_scale(scheme: WeightScheme) -> None:
    log.warning(
        "some static scales of activations (%s) are not positive numbers and are not used",
        scheme.input_scale,
    )


UNUSED_SUFFIXES = (
    *(*INPUT_SCALES, "input_zero_point", "weight_shape"),
    *("kv_scale", "k_scale", "v_scale", "q_scale", "output_scale", "input_global_scale"),
)
"""Suffixes of tensors in quantized checkpoints that need not be loaded. A static scale of
activations is loaded only if the scheme uses it (`WeightScheme.input_scale`), the KV cache has no
static scales, and shapes are known."""


def assign_methods(
    decoder: Decoder, modules: Mapping[str, QuantizedModule], regions: Mapping[str, Region]
) -> None:
    """Set the method of each quantized `Linear`, and of each quantized stack, of a decoder.

    Args:
        regions: this rank's regions of tensors; see `sharding.regions`.
    """
    for names, linear in decoder.linears():
        if names[0] in modules:
            linear.method = QuantizedMethod(tuple(modules[name] for name in names), regions)
    for name, stack in decoder.stacks():
        if name in modules:
            stack.method = mxfp4_stack_method(modules[name], stack, regions.get(name, ()))


def has_int4_groups(scheme: WeightScheme) -> bool:
    """Return whether some CPU can multiply these 4-bit weights by INT8 activations as integers."""
    if scheme.bits != 4 or scheme.activations != "int8" or scheme.act_order:
        return False
    return scheme.group_size <= 0 or divides_blocks(scheme.group_size)


def uses_w8a8_products(scheme: WeightScheme, device: torch.device) -> bool:
    """Return whether weights of this scheme are multiplied by quantized activations on a GPU."""
    return (scheme.allows_int8_products and has_w8a8_products("int8", device)) or (
        scheme.allows_fp8_products and has_w8a8_products("fp8", device)
    )


def method_names(modules: Mapping[str, QuantizedModule]) -> str:
    """Return the names of all linear methods of a model, joined by commas; "float" if none."""
    return ", ".join(sorted({module.scheme.name for module in modules.values()})) or "float"


def _described_in_full(scheme: WeightScheme) -> str:
    """Return the name of a scheme, and whether the scheme has zero points."""
    return scheme.name if scheme.symmetric else f"{scheme.name} with zero points"


def log_weight_only(
    modules: Mapping[str, QuantizedModule], device: torch.device, dtype: torch.dtype
) -> None:
    """Log a warning if no kernel multiplies quantized activations that a checkpoint requests."""
    schemes = {module.scheme for module in modules.values()}
    has_int8 = not int8_unsupported_reason(device, dtype)
    has_int4 = has_int4_products(device, dtype)
    lacking = [
        each
        for each in schemes
        if each.activations
        and not (each.allows_int8_products and has_int8)
        and not (has_int4_groups(each) and has_int4)
        and not uses_w8a8_products(each, device)
    ]
    if lacking:
        log.warning(
            "%s matrix multiplication is not available for %s on %s with %s: weights stay "
            "quantized, and activations are not quantized (weight-only)",
            " and ".join(sorted({each.activations.upper() for each in lacking})),
            " and ".join(sorted({_described_in_full(each) for each in lacking})), device.type,
            str(dtype).removeprefix("torch."),
        )  # fmt: skip
