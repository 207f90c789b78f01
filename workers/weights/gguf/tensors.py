"""Tensors of a GGUF file, with the names and shapes of a safetensors checkpoint."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from penstock.common.gguf.checkpoint import open_gguf
from penstock.common.gguf.header import GgufTensor
from penstock.common.gguf.tensor_types import BY_NAME
from penstock.workers.models.config import BadCheckpoint
from penstock.workers.models.spec import ModelSpec, read_spec
from penstock.workers.weights.gguf.dequantize import DEQUANTIZE, dequantize
from penstock.workers.weights.gguf.tensor_names import NOT_WEIGHTS, checkpoint_names
from penstock.workers.weights.regions import Ranges, Region
from penstock.workers.weights.tensor_entry import TensorEntry

# Number of items to dequantize in one call. The rows of one head are never split.
CHUNK_ITEMS = 1 << 20


@dataclass(frozen=True, slots=True)
class GgufEntry(TensorEntry):
    """A tensor in a GGUF file.

    Attributes:
        own_name: Name in the file.
        head_rows: Number of rows per head if llama.cpp's converter has reordered the rows of heads
            (queries and keys of Llama); 0 for other tensors.
        offset: Number added to each item; -1 for Gemma's norms, which are 1 + weight in GGUF files.
    """

    own_name: str = ""
    head_rows: int = 0
    offset: float = 0.0

    @property
    def stored_name(self) -> str:
        return self.own_name

    def loadable_dtypes(self, accepted: tuple[str, ...]) -> tuple[str, ...]:
        # all block types can be loaded, because each is dequantized to floats
        return tuple(DEQUANTIZE)

    def bytes_of(self, num_items: int) -> int:
        kind = BY_NAME[self.dtype]
        return num_items * kind.block_bytes // kind.block_items

    def load(
        self,
        target: Tensor,
        file: BufferedReader,
        progress: Callable[[int], None],
        region: Region = (),
    ) -> None:
        read = partial(self.read_rows, file, target.device)
        self.load_converted(target, read, progress, region, self._floats, self.bytes_of)

    def load_converted(
        self,
        target: Tensor,
        read: Callable[[int, int], Tensor],
        progress: Callable[[int], None],
        region: Region,
        convert: Callable[[Tensor], Tensor],
        bytes_of: Callable[[int], int],
    ) -> None:
        """Load as in `load`, but convert blocks with `convert`.

        Args:
            target: Contiguous tensor for the converted items, with the shape of the region.
            read: Called with (first row, number of rows); returns the blocks of these rows as
                `read_rows` does.
            region: Part of the matrix of converted items to load; empty means all of it.
            convert: Converts blocks [n, bytes of a block] to items [n, items per block].
            bytes_of: Converts a number of items to the number of bytes to report to `progress`.
        """
        rows, columns = self._ranges(region)
        matrix = target.view(-1, 1) if target.dim() == 1 else target
        filled = done = 0
        for first, count in self._chunks(rows):
            items = convert(read(first, count)).reshape(count, -1)
            if columns is not None:
                items = torch.cat([items[:, start:end] for start, end in columns], 1)
            if self.head_rows:
                items = _in_halves(items, self.head_rows)
            matrix[filled : filled + count].copy_(items)
            filled += count
            total = bytes_of(filled * matrix.shape[1])
            progress(total - done)
            done = total

    def _floats(self, blocks: Tensor) -> Tensor:
        items = dequantize(blocks, self.dtype)
        return items + self.offset if self.offset else items

    def _ranges(self, region: Region) -> tuple[Ranges, Ranges | None]:
        """Return the ranges of rows, and the ranges of columns (None: all)."""
        rows = region[0] if region else None
        columns = region[1] if len(region) > 1 else None
        return ((0, self.shape[0]),) if rows is None else rows, columns

    def _chunks(self, ranges: Ranges) -> Iterable[tuple[int, int]]:
        """Yield (first row, number of rows) of each chunk; do not split a head's rows."""
        unit = self.head_rows or 1
        step = max(1, CHUNK_ITEMS // (self._row_items * unit)) * unit
        for first, last in ranges:
            for start in range(first, last, step):
                yield start, min(step, last - start)

    @property
    def _row_items(self) -> int:
        return self.shape[1] if len(self.shape) == 2 else 1

    def read_rows(
        self, file: BufferedReader, device: torch.device, first: int, count: int
    ) -> Tensor:
        """Return the blocks of `count` rows from row `first` on, on `device`.

        The shape is [number of blocks, bytes per block], the dtype uint8.
        """
        row_bytes = self.bytes_of(self._row_items)
        buffer = bytearray(count * row_bytes)
        file.seek(self.start + first * row_bytes)
        if file.readinto(buffer) != len(buffer):
            raise BadCheckpoint(
                f"{self.path} is corrupt or incomplete: it ends inside tensor {self.own_name}. "
                "Copy or download it again"
            )
        blocks = torch.frombuffer(buffer, dtype=torch.uint8).to(device)
        return blocks.view(-1, BY_NAME[self.dtype].block_bytes)


def _in_halves(items: Tensor, head_rows: int) -> Tensor:
    """Reorder the rows of heads from pairs (0, 0', 1, 1', ...) to halves (0, 1, ..., 0', 1', ...).

    llama.cpp's rotary embedding pairs neighboring features of Llama's heads. Other implementations
    pair features half a head apart, so llama.cpp's converter interleaves the halves of each head.
    """
    pairs = items.view(-1, head_rows // 2, 2, items.shape[1])
    return pairs.transpose(1, 2).reshape(items.shape)


def find_gguf_tensors(path: Path) -> dict[str, TensorEntry]:
    """Return all tensors of a model's GGUF files, by their names in a safetensors checkpoint.

    Raises:
        BadCheckpoint: A tensor is missing, is not one of the model's, or has an invalid shape.
        UnsupportedModel: For the same reasons as in `read_spec`.
    """
    checkpoint, spec = open_gguf(path), read_spec(path)
    names = checkpoint_names(spec)
    stored = {name: each for name, each in checkpoint.tensors.items() if name not in NOT_WEIGHTS}
    problems = (
        ("lacks", names.keys() - stored.keys()),
        ("has the unexpected", stored.keys() - names.keys()),
    )
    for verb, wrong in problems:
        if wrong:
            first, *others = sorted(wrong)
            more = f" and {len(others)} more" if others else ""
            raise BadCheckpoint(
                f"{path} {verb} tensor {first}{more} (the metadata says {spec.family}, "
                f"{spec.num_layers} layers): the file is incomplete or of another model"
            )
    is_paired = checkpoint.metadata.text("general.architecture") == "llama"
    return {
        names[name]: _entry(spec, names[name], each, is_paired) for name, each in stored.items()
    }


def _entry(spec: ModelSpec, name: str, tensor: GgufTensor, is_paired: bool) -> GgufEntry:
    path = tensor.path
    if len(tensor.shape) > 2 or (len(tensor.shape) == 1 and tensor.type.block_items > 1):
        raise BadCheckpoint(
            f"{path}: tensor {tensor.name} has type {tensor.type.name} and shape "
            f"{list(tensor.shape)}: expected a matrix, or a vector of a float type"
        )
    query_or_key = tuple(f".{part}" for part in spec.names.qkv[:2]) if is_paired else ()
    owner = name.rpartition(".")[0]
    is_norm = spec.norm_kind == "rms_above_one" and tensor.name.endswith("norm.weight")
    return GgufEntry(
        path,
        name,
        tensor.type.name,
        tensor.shape,
        tensor.start,
        tensor.num_bytes,
        own_name=tensor.name,
        head_rows=spec.head_dim if query_or_key and owner.endswith(query_or_key) else 0,
        offset=-1.0 if is_norm else 0.0,
    )
