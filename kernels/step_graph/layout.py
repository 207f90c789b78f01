"""Which rows of its places an operation of a `program` computes: each token's, or an expert's."""

from dataclasses import dataclass

from penstock.kernels.step_graph.opcodes import ALIGNMENT


@dataclass(frozen=True, slots=True)
class RowRange:
    """Which rows of its places an operation computes: where a program has their numbers. Of none
    at all it is left out."""

    first: int
    count: int


TOKENS = RowRange(0, 1)
"""A row a token."""


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Tokens and the experts that they have chosen: where a program has its whole numbers."""

    at: int  # [2 E]: each expert's first row, and how many it has
    choices: int  # [T, k]: a token's experts; once sorted, its rows
    num_experts: int
    top_k: int

    def rows(self, expert: int) -> RowRange:
        """Its, in places of this spread."""
        return RowRange(self.at + expert, self.at + self.num_experts + expert)

    def all_rows(self) -> list[RowRange]:
        """Those of every expert."""
        return [self.rows(expert) for expert in range(self.num_experts)]

    def num_rows(self, num_tokens: int) -> int:
        """Rows of a place in which every expert's begin where none of another's are written."""
        num_choices = num_tokens * self.top_k
        return min(4 * num_choices, num_choices + ALIGNMENT * self.num_experts)
