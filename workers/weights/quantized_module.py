"""A quantized module of a checkpoint, its stored tensors, and its division among ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from penstock.workers.models.weight_scheme import WeightScheme
from penstock.workers.parallel.mesh import BadShape
from penstock.workers.weights.regions import Ranges, Region


@dataclass(frozen=True, slots=True)
class QuantizedModule:
    """A quantized module of the checkpoint: name, scheme, and sizes in the whole model."""

    name: str
    scheme: WeightScheme
    outputs: int
    inputs: int
    has_group_table: bool  # the checkpoint has `g_idx`, the group of each input
    optional: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes in the file, by suffix, of tensors that are optional or whose sizes vary."""

    @property
    def num_groups(self) -> int:
        size = self.scheme.group_size
        return -(-self.inputs // size) if size > 0 else 1

    @property
    def per_word(self) -> int:
        """Number of codes in a word of 32 bits."""
        return 32 // self.scheme.bits


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a module. Its full name is MODULE.SUFFIX."""

    suffix: str
    shape: tuple[int, ...]  # shape in the whole model
    dtype: torch.dtype  # dtype in memory, until the module is finished
    accepts: tuple[str, ...]  # dtypes that the tensor may have in the file
    region: Region = ()  # the part that a rank loads
    # other shapes that the same items may have in the file
    alternatives: tuple[tuple[int, ...], ...] = ()


def group_cut(module: QuantizedModule, columns: Ranges | None) -> Ranges | None:
    """Return the ranges of groups that contain a rank's inputs `columns`, or None for all groups.

    With a group table, the result is None, because any input may be in any group.
    """
    if module.num_groups == 1 or module.has_group_table:
        return None
    return divided(module, columns, module.scheme.group_size, module.inputs, "inputs")


def input_range(name: str, columns: Ranges | None, in_pairs: bool) -> tuple[int, int] | None:
    """Return a rank's inputs of a layer as one range; None: all inputs.

    Raises:
        BadShape: `in_pairs` is set (a byte has two codes), and the number of inputs is odd.
    """
    if columns is None:
        return None
    ((first, last),) = columns
    if in_pairs and (last - first) % 2:
        raise BadShape(
            f"{name}: a rank has {last - first} inputs, an odd number: 4-bit codes are stored in "
            "pairs; use fewer tensor-parallel ranks"
        )
    return first, last


def divided(
    module: QuantizedModule, ranges: Ranges | None, unit: int, size: int, what: str
) -> Ranges | None:
    """Convert ranges of items to ranges of units of `unit` items.

    The dimension has `size` items. The last unit of the dimension may be incomplete.

    Raises:
        BadShape: A range begins or ends inside a unit.
    """
    if ranges is None or ranges == ((0, size),):
        return None if ranges is None else ((0, -(-size // unit)),)
    for bound in (bound for each in ranges for bound in each):
        if bound % unit and bound != size:
            raise BadShape(
                f"{module.name}: a rank's {what} begin or end at {bound}, inside a unit of {unit} "
                f"{what} ({module.scheme.name}): use fewer tensor-parallel ranks"
            )
    return tuple((first // unit, -(-last // unit)) for first, last in ranges)
