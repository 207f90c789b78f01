"""Rows that an operation of a step graph computes: those of all tokens, or of one expert."""

from dataclasses import dataclass

from penstock.kernels.step_graph.opcodes import ALIGNMENT


@dataclass(frozen=True, slots=True)
class RowRange:
    """The rows that an operation computes, as two values in `CpuStepGraph.ints`.

    An operation with zero rows is skipped.
    """

    first: int  # index in `ints` of the value "first row"
    count: int  # index in `ints` of the value "number of rows"


TOKENS = RowRange(0, 1)
"""One row per token."""


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Layout of buffers sorted by expert; fields are indices in `CpuStepGraph.ints`."""

    at: int  # [2, E]: each expert's first row, then each expert's number of rows
    choices: int  # [T, k]: each token's expert numbers; after sorting, row numbers instead
    num_experts: int
    top_k: int

    def rows(self, expert: int) -> RowRange:
        """Return the rows of one expert."""
        return RowRange(self.at + expert, self.at + self.num_experts + expert)

    def all_rows(self) -> list[RowRange]:
        """Return the rows of each expert."""
        return [self.rows(expert) for expert in range(self.num_experts)]

    def num_rows(self, num_tokens: int) -> int:
        """Return the rows of a buffer, including padding after each expert that loops may write."""
        num_choices = num_tokens * self.top_k
        return min(4 * num_choices, num_choices + ALIGNMENT * self.num_experts)
