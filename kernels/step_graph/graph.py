"""A built CPU step graph, and the loading of its interpreter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.cpu_common.numba_runtime import configure_numba
from penstock.kernels.kv_cache.format import flat_array, format_of
from penstock.kernels.step_graph.layout import TOKENS, Buffer
from penstock.kernels.step_graph.opcodes import ALIGNMENT, Extensions
from penstock.kernels.step_graph.operations import Operation
from penstock.kernels.step_graph.table import make_tables

Ints = npt.NDArray[np.integer[Any]]

_LINE = 16  # number of float32 in a cache line


@dataclass(frozen=True, slots=True)
class CpuStepGraph:
    """A compiled step graph. Not thread-safe: only one `run` may be active at a time."""

    # kept because they own the memory to which the addresses in `table` point
    operations: tuple[Operation, ...]
    table: npt.NDArray[np.int64]  # [operations, NUM_COLUMNS], see `opcodes`
    floats: npt.NDArray[np.float32]  # [operations, NUM_FLOATS] float parameters
    ints: npt.NDArray[np.int64]  # integers set in each step: see `RowRange` and `ExpertLayout`
    arena: Tensor  # memory of all buffers
    cache: npt.NDArray[Any]  # flat KV cache, see `kv_cache.format.flat_array`
    num_slots: int  # number of token slots of the cache
    extensions: Extensions  # additional opcodes that the interpreter of this graph must support

    @staticmethod
    def of(
        operations: Sequence[Operation], arena_size: int, num_ints: int, cache: Tensor
    ) -> "CpuStepGraph":
        """Compile the operations.

        Args:
            operations: the operations, in the order of execution.
            arena_size: number of elements of the arena.
            num_ints: number of integers in `ints`.
            cache: KV cache of the `GraphBuilder`.
        """
        table, floats = make_tables(operations)
        storage = torch.zeros(arena_size + ALIGNMENT)
        start = -storage.data_ptr() // 4 % _LINE  # aligns the buffers to cache lines
        return CpuStepGraph(
            operations=tuple(operations),
            table=table,
            floats=floats,
            ints=np.zeros(num_ints, np.int64),
            arena=storage[start : start + arena_size],
            cache=flat_array(cache),
            num_slots=cache[0, 0, :, 0, :, 0].numel(),
            extensions=Extensions.of(each.opcode for each in operations),
        )

    def view(self, buffer: Buffer, num_rows: int) -> Tensor:
        """Return a view of the first `num_rows` rows of a buffer, [num_rows, width]."""
        return self.arena[buffer.at :][: num_rows * buffer.width].view(num_rows, buffer.width)

    def run(self, slots: Ints, context_lens: Ints, block_tables: Ints) -> None:
        """Run the operations for one token of each of T sequences.

        Args:
            slots: [T] cache slots where each token's keys and values are written.
            context_lens: [T] number of positions that each token attends to, itself included.
            block_tables: [T, M] numbers of each sequence's cache blocks.

        Raises:
            IndexError: if a slot is outside of the cache.
        """
        if not 0 <= slots.min() <= slots.max() < self.num_slots:
            raise IndexError(
                f"slots has numbers from {slots.min()} to {slots.max()}: expected 0 to "
                f"{self.num_slots - 1}"
            )
        self.ints[TOKENS.count] = len(slots)
        _interpreter(str(self.cache.dtype), self.extensions)(
            self.table, self.floats, self.ints, self.arena.numpy(), self.cache,
            slots.astype(np.int64), context_lens.astype(np.int64),
            np.ascontiguousarray(block_tables, np.int32), num_threads=torch.get_num_threads(),
        )  # fmt: skip


def loops_name(cache: torch.dtype, extensions: Extensions) -> str:
    """Return the name of the group of compiled loops that `load_cpu_kernels` loads."""
    return f"program-{format_of(cache).name}{extensions}"


def load_cpu_kernels(cache: torch.dtype, extensions: Extensions) -> None:
    """Load an interpreter; compile it if it is not in the cache on disk.

    Args:
        cache: dtype of the KV cache.
        extensions: see `CpuStepGraph`.
    """
    _interpreter(format_of(cache).array_dtype, extensions)


def _interpreter(rows: str, extensions: Extensions) -> Any:
    """Return the interpreter for a flat KV cache with the numpy dtype `rows`."""
    configure_numba()
    from penstock.kernels.step_graph.interpreter import compile_interpreter

    return compile_interpreter(rows, extensions)
