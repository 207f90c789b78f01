"""The inputs of decode steps, in places that never change: a captured graph reads them there."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.workers.gpu.pinned import pinned
from penstock.workers.scheduling.sequence import Ints, StepPlan

_TOKENS, _POSITIONS, _SLOTS, _CONTEXTS = range(4)


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One ragged batch where it computes: T tokens of B sequences. All int32."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    query_starts: Tensor  # [B + 1]
    context_lens: Tensor  # [B]
    block_tables: Tensor  # [B, M]; entries past a sequence's blocks mean nothing
    max_query: int  # a bound: no sequence has more tokens here
    max_context: int  # a bound: none has a longer context


class DecodeInputs:
    """Places for the inputs of up to R rows, a token each.

    Rows that a step lacks are padding: token 0 at position 0 of a sequence of its own, in the
    scratch block, which no sequence ever has. What comes of them is nobody's.
    """

    def __init__(
        self, max_rows: int, num_columns: int, block_size: int, scratch: int, device: torch.device
    ) -> None:
        """num_columns: of a block table; scratch: number of the scratch block."""
        self._padding = padding(max_rows, block_size, scratch)
        self._scratch = scratch
        self._vectors = torch.from_numpy(self._padding.copy()).to(device)
        tables = torch.full((max_rows, num_columns), scratch, dtype=torch.int32)
        self._tables = tables.to(device)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

    def batch(self, num_rows: int, max_context: int) -> DeviceBatch:
        """The first rows' places."""
        vectors = self._vectors[:, :num_rows]
        return DeviceBatch(
            tokens=vectors[_TOKENS],
            positions=vectors[_POSITIONS],
            slots=vectors[_SLOTS],
            query_starts=self._starts[: num_rows + 1],
            context_lens=vectors[_CONTEXTS],
            block_tables=self._tables[:num_rows],
            max_query=1,
            max_context=max_context,
        )

    def fill(self, plan: StepPlan, num_rows: int, drawn: Tensor | None) -> None:
        """Sets the first rows as the plan says, and the padding behind it.

        plan: of decodes only, at most `num_rows`. drawn: [B] its tokens, where they are on the
        device but not in the plan yet. The device works on meanwhile: nothing here waits for it.
        """
        device = self._vectors.device
        vectors, tables = packed(plan, self._padding, num_rows, self._scratch)
        self._vectors.copy_(pinned(vectors, device), non_blocking=True)
        width = tables.shape[1]
        self._tables[:num_rows, :width].copy_(pinned(tables, device), non_blocking=True)
        if drawn is not None:
            self._vectors[_TOKENS, : len(drawn)].copy_(drawn)


def padding(max_rows: int, block_size: int, scratch: int) -> Ints:
    """[4, max_rows]: tokens, positions, slots and contexts of rows that are all padding."""
    rows = np.zeros((4, max_rows), np.int32)
    rows[_SLOTS] = scratch * block_size + np.arange(max_rows) % block_size
    rows[_CONTEXTS] = 1
    return rows


def packed(
    plan: StepPlan, padding_rows: Ints, num_rows: int, scratch: int
) -> tuple[Ints, npt.NDArray[np.int32]]:
    """The vectors [4, R] and block tables [num_rows, M] of a step, padding behind its own rows."""
    count = len(plan.rows)
    vectors = padding_rows.copy()
    for index, values in enumerate((plan.tokens, plan.positions, plan.slots, plan.context_lens)):
        vectors[index, :count] = values
    tables = np.full((num_rows, plan.block_tables.shape[1]), scratch, np.int32)
    tables[:count] = plan.block_tables
    return vectors, tables
