"""Memory of a step graph: buffers, and the rows of buffers that an operation processes."""

from dataclasses import dataclass

from penstock.kernels.step_graph.opcodes import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Buffer:
    """A contiguous matrix [rows, width] in the arena."""

    at: int  # index of the buffer's first element in the arena
    width: int


@dataclass(frozen=True, slots=True)
class RowRange:
    """The rows that an operation processes, as two values in `CpuStepGraph.ints`.

    An operation with zero rows is skipped.
    """

    first: int  # `ints[first]` is the first row
    count: int  # `ints[count]` is the number of rows


TOKENS = RowRange(0, 1)
"""The rows of all tokens, one row per token."""


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Layout of buffers whose rows are sorted by expert, for E experts and k choices per token.

    `at` and `choices` are indices of arrays in `CpuStepGraph.ints`.
    """

    at: int  # index of [2, E]: each expert's first row, then each expert's number of rows
    choices: int  # index of [T, k]: each choice's expert before sorting, each choice's row after it
    num_experts: int
    top_k: int

    def rows(self, expert: int) -> RowRange:
        """Return the range of rows of one expert."""
        return RowRange(self.at + expert, self.at + self.num_experts + expert)

    def all_rows(self) -> list[RowRange]:
        """Return the ranges of rows of all experts."""
        return [self.rows(expert) for expert in range(self.num_experts)]

    def num_rows(self, num_tokens: int) -> int:
        """Return the number of rows of a buffer, with the padding after each expert's rows."""
        num_choices = num_tokens * self.top_k
        return min(4 * num_choices, num_choices + ALIGNMENT * self.num_experts)
