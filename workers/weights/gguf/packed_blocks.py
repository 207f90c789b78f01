"""Keeps blocks of Q8_0 and Q4_0 packed, as codes and scales for weight-only products.

A weight of such a block is scale * q, with one float16 scale per 32 inputs and a q of 8 or 4 bits.
Compressed-tensors checkpoints with groups of 32 inputs define their weights in the same way. Each
matrix is therefore split into the two tensors of such a checkpoint, codes and scales, which
`QuantizedMethod` loads and multiplies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.common.gguf.checkpoint import is_gguf, open_gguf
from penstock.common.gguf.tensor_types import BY_NAME
from penstock.kernels.linear.quantized import has_weight_only_kernel, supports_dequantizing
from penstock.workers.models.config import BadCheckpoint
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.weight_scheme import WeightScheme
from penstock.workers.parallel.mesh import Mesh
from penstock.workers.weights.gguf.k_quants import as_float, nibbles
from penstock.workers.weights.gguf.tensors import GgufEntry
from penstock.workers.weights.quantized_module import QuantizedModule
from penstock.workers.weights.regions import Ranges, Region
from penstock.workers.weights.sharding import regions
from penstock.workers.weights.tensor_entry import TensorEntry

GROUP = 32
"""Number of inputs of a block, which is also the group size of the packed weights."""

_SCALE_BYTES = 2  # a block begins with its float16 scale

_HELD_GROUP_BYTES = 5
"""Bytes in memory per output and group: a float32 scale and a zero point."""

_ITEM_BYTES = {"I8": 1, "I32": 4, "F16": 2}
"""Bytes per item of codes or scales, by the name of their dtype in safetensors files."""


class _Form(NamedTuple):
    """The compressed-tensors form in which blocks of one type are loaded."""

    scheme: WeightScheme
    codes: str  # suffix of the name of the codes
    dtype: str  # dtype of the codes
    convert: Callable[[Tensor], Tensor]  # converts blocks to codes [n, items per block]


def _q8_0_codes(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8)


def _q4_0_words(blocks: Tensor) -> Tensor:
    """Return int32 words of 8 codes, ordered by input. A code is q + 8, as in the file."""
    codes = nibbles(blocks[:, 2:])
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).view(torch.int32)


def _scales(blocks: Tensor) -> Tensor:
    return as_float(blocks[:, :_SCALE_BYTES])


_FORMS = {
    "Q8_0": _Form(WeightScheme("int8", 8, GROUP), "weight", "I8", _q8_0_codes),
    "Q4_0": _Form(WeightScheme("packed", 4, GROUP), "weight_packed", "I32", _q4_0_words),
}
"""Form in which each block type is loaded, by the name of the type."""


@dataclass(frozen=True, slots=True)
class PackedTensor(TensorEntry):
    """The codes or the scales of a matrix in a GGUF file, with their own `shape` and `dtype`.

    Attributes:
        matrix: The matrix in the file.
        convert: Converts blocks to codes or to scales.
        scale_bytes: Scales of the blocks that were read for the codes, by the rows of the blocks.
            They are kept so that the file is not read a second time for the scales. The
            `PackedTensor` of the codes and that of the scales share this dict.
    """

    matrix: GgufEntry
    convert: Callable[[Tensor], Tensor]
    scale_bytes: dict[Ranges | None, list[Tensor]]

    @property
    def stored_name(self) -> str:
        return self.matrix.stored_name

    def loadable_dtypes(self, accepted: tuple[str, ...]) -> tuple[str, ...]:
        return accepted

    def bytes_of(self, num_items: int) -> int:
        return num_items * _ITEM_BYTES[self.dtype]

    def load(
        self,
        target: Tensor,
        file: BufferedReader,
        progress: Callable[[int], None],
        region: Region = (),
    ) -> None:
        rows = region[0] if region else None
        read = partial(self.matrix.read_rows, file, target.device)
        if not self._is_scales:
            self._load_codes(target, read, progress, region, rows)
            return
        if rows in self.scale_bytes:
            kept = iter(self.scale_bytes.pop(rows))
            self._load(target, lambda first, count: next(kept), progress, region)
        else:
            self._load(target, read, progress, region)
        if not target.isfinite().all():
            raise BadCheckpoint(
                f"{self.path} is corrupt: tensor {self.stored_name} has a scale that is not a "
                "finite number. Copy or download it again"
            )

    @property
    def _is_scales(self) -> bool:
        return self.dtype == "F16"

    def _load_codes(
        self,
        target: Tensor,
        read: Callable[[int, int], Tensor],
        progress: Callable[[int], None],
        region: Region,
        rows: Ranges | None,
    ) -> None:
        """Load the codes, and keep the scales of the blocks that are read."""
        kept: list[Tensor] = []

        def read_and_keep(first: int, count: int) -> Tensor:
            blocks = read(first, count)
            kept.append(blocks[:, :_SCALE_BYTES].clone())
            return blocks

        self._load(target, read_and_keep, progress, region)
        self.scale_bytes[rows] = kept

    def _load(
        self,
        target: Tensor,
        read: Callable[[int, int], Tensor],
        progress: Callable[[int], None],
        region: Region,
    ) -> None:
        self.matrix.load_converted(target, read, progress, region, self.convert, self.bytes_of)


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """The modules of a model whose blocks stay packed.

    Attributes:
        modules: The modules by name; see `QuantizedMethod`.
        types: The block types of these modules.
    """

    modules: Mapping[str, QuantizedModule]
    types: tuple[str, ...]

    @property
    def num_items(self) -> int:
        """The number of packed weights."""
        return sum(each.outputs * each.inputs for each in self.modules.values())

    @property
    def num_bytes(self) -> int:
        """The bytes in memory of the packed weights: codes, scales and zero points."""
        return sum(
            each.outputs
            * (each.inputs * each.scheme.bits // 8 + each.num_groups * _HELD_GROUP_BYTES)
            for each in self.modules.values()
        )


NO_BLOCKS = PackedBlocks({}, ())


def keeps_blocks(
    model: Path, quantization: str, deterministic: bool, device: torch.device, dtype: torch.dtype
) -> bool:
    """Return whether the Q8_0 and Q4_0 blocks of a model, if there are any, stay packed.

    Blocks of a GGUF file stay packed if `quantization` is "none" and a kernel multiplies packed
    weights. In deterministic mode, this kernel must be batch-invariant.
    """
    if quantization != "none" or not is_gguf(model):
        return False
    if deterministic:
        return supports_dequantizing(device, dtype)
    return has_weight_only_kernel(device, dtype)


def has_packable_blocks(model: Path) -> bool:
    """Return whether any matrix of a GGUF file, except the embeddings, is Q8_0 or Q4_0."""
    tensors = open_gguf(model).tensors
    return any(
        each.type.name in _FORMS for name, each in tensors.items() if name != "token_embd.weight"
    )


def find_packed_blocks(
    spec: ModelSpec, whole: Decoder, entries: Mapping[str, TensorEntry], mesh: Mesh
) -> PackedBlocks:
    """Find the linear layers whose blocks stay packed.

    All matrices of a fused layer must have the same type, and no rank may hold a part of a block.
    The result is the same for all ranks of a worker.

    Args:
        spec: The spec of the whole model.
        whole: The decoder of the whole model, on the `meta` device.
        entries: The tensors of the GGUF file.
        mesh: The arrangement of all ranks.
    """
    cuts = [regions(spec, mesh.coord(rank)) for rank in range(mesh.num_ranks)]
    modules: dict[str, QuantizedModule] = {}
    types = set()
    for names, linear in whole.linears():
        inputs, sizes = linear.weight.shape[1], linear.module_sizes(names)
        found = [entries.get(f"{name}.weight") for name in names]
        shapes = [None if each is None else each.shape for each in found]
        dtypes = {None if each is None else each.dtype for each in found}
        dtype = dtypes.pop()
        # `load_model` refuses a wrong shape later; the error names the shape in the file
        if dtypes or dtype not in _FORMS or shapes != [(size, inputs) for size in sizes]:
            continue
        if any(_cuts_block(each.get(f"{name}.weight", ())) for each in cuts for name in names):
            continue
        types.add(dtype)
        for name, size in zip(names, sizes, strict=True):
            scheme = _FORMS[dtype].scheme
            modules[name] = QuantizedModule(name, scheme, size, inputs, has_group_table=False)
    return PackedBlocks(modules, tuple(sorted(types)))


def _cuts_block(region: Region) -> bool:
    columns: Ranges | None = region[1] if len(region) > 1 else None
    return any(bound % GROUP for each in columns or () for bound in each)


def split_packed(
    entries: Mapping[str, TensorEntry], packed: PackedBlocks
) -> dict[str, TensorEntry]:
    """Return all tensors, with codes and scales in place of each packed matrix."""
    found = dict(entries)
    for name in packed.modules:
        matrix = found.pop(f"{name}.weight")
        assert isinstance(matrix, GgufEntry)
        form = _FORMS[matrix.dtype]
        make = partial(_packed_tensor, matrix, name, {})
        found[f"{name}.{form.codes}"] = make(form.codes, form.dtype, form.convert)
        found[f"{name}.{form.scheme.scale_name}"] = make(form.scheme.scale_name, "F16", _scales)
    return found


def _packed_tensor(
    matrix: GgufEntry,
    module: str,
    scale_bytes: dict[Ranges | None, list[Tensor]],
    suffix: str,
    dtype: str,
    convert: Callable[[Tensor], Tensor],
) -> PackedTensor:
    outputs, inputs = matrix.shape
    is_scales = dtype == "F16"
    block_bytes = _SCALE_BYTES if is_scales else BY_NAME[matrix.dtype].block_bytes - _SCALE_BYTES
    shape = outputs, inputs // GROUP * (block_bytes // _ITEM_BYTES[dtype])
    num_bytes = outputs * inputs // GROUP * block_bytes
    return PackedTensor(
        *(matrix.path, f"{module}.{suffix}", dtype, shape, matrix.start, num_bytes),
        *(matrix, convert, scale_bytes),
    )
