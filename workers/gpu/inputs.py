"""Inputs of decode steps in device buffers at fixed addresses; captured graphs read the buffers."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.attention.backends.interface import HostBatch
from penstock.workers.gpu.pinned import pinned
from penstock.workers.scheduling.sequence import Ints, StepPlan

_TOKENS, _POSITIONS, _SLOTS, _CONTEXTS = range(4)


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One ragged batch on the device: T tokens of B sequences. Index tensors are int32."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    query_starts: Tensor  # [B + 1] index of each sequence's first token, then T
    context_lens: Tensor  # [B]
    block_tables: Tensor  # [B, M] block numbers; entries past a sequence's blocks are ignored
    max_query: int  # upper bound of the number of tokens of a sequence in this batch
    max_context: int  # upper bound of `context_lens`
    received: Tensor | None = None  # [T, hidden_size] hidden states of the previous stage, if any


class DecodeInputs:
    """Buffers on the device for the inputs of up to R rows of one token each.

    Unused rows are padding: token 0 at position 0 of a separate sequence, in the scratch block. No
    real sequence uses the scratch block. The results of padding rows are ignored.
    """

    def __init__(
        self,
        max_rows: int,
        num_columns: int,
        block_size: int,
        scratch: int,
        device: torch.device,
        received: Tensor | None = None,
    ) -> None:
        """Allocate the buffers.

        num_columns: number of columns of the block table.
        scratch: number of the scratch block.
        received: [R, hidden_size] buffer for the hidden states of the previous stage; the initial
            contents must be finite. None: this is the first stage.
        """
        self._received = received
        self._padding = padding(max_rows, block_size, scratch)
        self._scratch = scratch
        self._vectors = torch.from_numpy(self._padding.copy()).to(device)
        tables = torch.full((max_rows, num_columns), scratch, dtype=torch.int32)
        self._tables = tables.to(device)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

    def batch(self, num_rows: int, max_context: int) -> DeviceBatch:
        """Return the first `num_rows` rows of the buffers as a batch."""
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
            received=None if self._received is None else self._received[:num_rows],
        )

    def fill(
        self,
        plan: StepPlan,
        num_rows: int,
        drawn: Tensor | None,
        received: Tensor | None = None,
    ) -> HostBatch:
        """Copy the plan into the first rows, and padding into the rest, without waiting.

        Args:
            plan: a plan of at most `num_rows` sequences, with one token each.
            num_rows: number of rows of the graph.
            drawn: [B] the sequences' tokens on the device, if `plan` does not have them yet.
            received: [B, hidden_size] hidden states of the previous stage; None: first stage.

        Returns:
            The rows on the host, padding included.
        """
        device = self._vectors.device
        vectors, tables = packed(plan, self._padding, num_rows, self._scratch)
        self._vectors.copy_(pinned(vectors, device), non_blocking=True)
        width = tables.shape[1]
        self._tables[:num_rows, :width].copy_(pinned(tables, device), non_blocking=True)
        if drawn is not None:
            self._vectors[_TOKENS, : len(drawn)].copy_(drawn)
        if self._received is not None and received is not None:
            self._received[: len(received)].copy_(received)
        return _host_batch(vectors[_CONTEXTS, :num_rows], tables)

    def padding_rows(self, num_rows: int) -> HostBatch:
        """Return `num_rows` padding rows on the host, with all columns of the block table."""
        tables = np.full((num_rows, self._tables.shape[1]), self._scratch, np.int32)
        return _host_batch(self._padding[_CONTEXTS, :num_rows], tables)


def _host_batch(context_lens: Ints, block_tables: Ints) -> HostBatch:
    starts = np.arange(len(context_lens) + 1, dtype=np.int32)
    return HostBatch(starts, context_lens, block_tables, is_captured=True)


def padding(max_rows: int, block_size: int, scratch: int) -> Ints:
    """Return tokens, positions, slots and context lengths of padding rows: [4, max_rows]."""
    rows = np.zeros((4, max_rows), np.int32)
    rows[_SLOTS] = scratch * block_size + np.arange(max_rows) % block_size
    rows[_CONTEXTS] = 1
    return rows


def packed(
    plan: StepPlan, padding_rows: Ints, num_rows: int, scratch: int
) -> tuple[Ints, npt.NDArray[np.int32]]:
    """Return a step's vectors [4, R] and block tables [num_rows, M], with padding rows added."""
    count = len(plan.rows)
    vectors = padding_rows.copy()
    for index, values in enumerate((plan.tokens, plan.positions, plan.slots, plan.context_lens)):
        vectors[index, :count] = values
    tables = np.full((num_rows, plan.block_tables.shape[1]), scratch, np.int32)
    tables[:count] = plan.block_tables
    return vectors, tables
