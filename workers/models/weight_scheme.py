"""Quantization of a checkpoint's weights: one scheme for each module. Needs no torch."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from penstock.kernels.linear.code_kinds import FP8_GROUP_INPUTS

Storage = Literal[
    "fp8", "int8", "packed", "gptq", "awq",
    "mxfp4", "nvfp4", "modelopt nvfp4", "bitsandbytes 4 bits", "bitsandbytes int8",
]  # fmt: skip
"""Layout of a module's tensors; `workers/weights/quantized_layouts.py` defines the tensors."""

UNNAMED_KIND = ("mxfp4", "nvfp4", "modelopt nvfp4", "bitsandbytes 4 bits", "bitsandbytes int8")
"""Storages whose names already include the kind of codes."""

INPUT_SCALES = ("input_scale", "activation_scale")
"""Suffixes that the tensor of a module's static activation scale may have."""

PER_OUTPUT = 0
"""Value of `WeightScheme.group_size` for one scale per output, or one for the whole tensor."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """The quantization and the storage format of the weights of some modules."""

    storage: Storage
    bits: int
    group_size: int = PER_OUTPUT  # inputs per group; PER_OUTPUT or -1: all inputs form one group
    block_rows: int = 1  # number of outputs that share a scale; above 1 for block-wise scales
    per_tensor: bool = False  # whether a whole module has one scale
    symmetric: bool = True  # False: the checkpoint has zero points
    act_order: bool = False  # whether the checkpoint has a table with the group of each input
    # number added to stored zero points: 1 for the format "gptq", 0 for "gptq_v2"
    zero_offset: int = 0
    scale_name: str = "weight_scale"
    activations: str = ""  # dtype of quantized activations, such as "fp8"; "": not quantized
    # suffix of the tensor with the static scale of the activations; "": scales at run time
    input_scale: str = ""
    table: str = ""  # bitsandbytes: table of the codes' values, "nf4" or "fp4"
    nested: bool = False  # bitsandbytes: the scales are quantized too (double quantization)

    @property
    def allows_int8_products(self) -> bool:
        """Whether the scheme is W8A8: products of INT8 weights and INT8 activations."""
        is_plain = self.bits == 8 and self.symmetric and not self.act_order
        return is_plain and self.activations == "int8" and self.group_size in (PER_OUTPUT, -1)

    @property
    def allows_fp8_products(self) -> bool:
        """Whether the scheme is W8A8: products of FP8 weights and FP8 activations on a GPU."""
        is_served = self.group_size in (PER_OUTPUT, -1, FP8_GROUP_INPUTS)
        return self.storage == "fp8" and self.activations == "fp8" and is_served

    @property
    def name(self) -> str:
        """Description for messages, and part of the KV layout string."""
        if self.block_rows > 1:
            scales = f"blocks of {self.block_rows} x {self.group_size}"
        elif self.group_size > 0:
            scales = f"groups of {self.group_size}"
        else:
            scales = "per tensor" if self.per_tensor else "per channel"
        if self.storage in UNNAMED_KIND:
            nested = ", double quantization" if self.nested else ""
            table = f" {self.table}" if self.table else ""
            return f"{self.storage.removesuffix(' 4 bits')}{table} {scales}{nested}"
        kind = "fp8" if self.storage == "fp8" else f"int{self.bits}"
        order = ", act-order" if self.act_order else ""
        static = ", static activations" if self.input_scale else ""
        return f"{self.storage} {kind} {scales}{order}{static}".replace("fp8 fp8", "fp8")


@dataclass(frozen=True, slots=True)
class Rule:
    """A quantization scheme, and the modules to which it applies."""

    # module names, regular expressions "re:REGEX", or "Linear" for all modules
    targets: tuple[str, ...]
    scheme: WeightScheme


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """The quantization of a checkpoint: the scheme of each module."""

    method: str  # value of `quant_method` in `config.json`
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...]  # unquantized modules; same notation as `Rule.targets`
    # True: an entry of `ignore` matches consecutive components anywhere in a module's dotted name.
    by_component: bool

    def scheme_of(self, module: str) -> WeightScheme | None:
        """Return the scheme of a module's weights, or None if the weights are not quantized.

        Args:
            module: name of the module in the checkpoint.
        """
        if any(self._is_ignored(module, entry) for entry in self.ignore):
            return None
        for rule in self.rules:
            if any(_matches(module, target) for target in rule.targets):
                return rule.scheme
        return next((rule.scheme for rule in self.rules if "Linear" in rule.targets), None)

    def _is_ignored(self, module: str, entry: str) -> bool:
        if self.by_component:
            return f".{entry}." in f".{module}." or ("*" in entry and fnmatchcase(module, entry))
        return entry == "Linear" or _matches(module, entry)


def _matches(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module
