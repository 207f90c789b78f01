"""What the leading rank has the others do, as bytes: step plans, and blocks to be moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.workers.parallel.lazy_module import LazyModule
from penstock.workers.scheduling.sequence import Ints, StepPlan

if TYPE_CHECKING:
    from penstock.protos import ranks_pb2 as wire
else:
    wire = LazyModule("penstock.protos.ranks_pb2")

_ARRAYS = (
    *("rows", "tokens", "positions", "query_starts", "context_lens", "block_tables", "slots"),
    *("copies", "forks", "scored"),
)
_ORDER_BYTES = 8192


def encode(plan: StepPlan) -> bytes:
    """A plan whose tokens are known."""
    arrays = {name: _bytes(getattr(plan, name)) for name in _ARRAYS}
    message = wire.Plan(number=plan.number, samples=plan.samples.tobytes(), **arrays)
    return wire.Order(plan=message).SerializeToString()


def decode(data: bytes) -> StepPlan | wire.Move:
    """What was encoded, or what a rank is to do with blocks."""
    order = wire.Order.FromString(data)
    return _plan(order.plan) if order.HasField("plan") else order.move


def _plan(message: wire.Plan) -> StepPlan:
    rows = _ints(message.rows)
    return StepPlan(
        number=message.number,
        rows=rows,
        tokens=_ints(message.tokens),
        positions=_ints(message.positions),
        query_starts=_ints(message.query_starts),
        context_lens=_ints(message.context_lens),
        block_tables=_ints(message.block_tables).reshape(len(rows), -1),
        slots=_ints(message.slots),
        samples=np.frombuffer(message.samples, np.bool_).copy(),
        copies=_ints(message.copies).reshape(-1, 2),
        forks=_ints(message.forks).reshape(-1, 2),
        scored=_ints(message.scored),
    )


def max_plan_bytes(max_sequences: int, max_tokens: int, num_columns: int) -> int:
    """That a plan takes with at most so many sequences, tokens and blocks a sequence; an order to
    move blocks of one, or to meet another worker's rank, takes less."""
    # Rows, starts, lengths, copies, forks and samples of sequences; four of tokens.
    return 4 * (max_sequences * (num_columns + 8) + 4 * max_tokens) + _ORDER_BYTES


def _bytes(array: Ints) -> bytes:
    return np.ascontiguousarray(array, np.dtype("<i4")).tobytes()


def _ints(data: bytes) -> Ints:
    # Its own memory, as a plan's always is: compiled kernels take no other.
    return np.frombuffer(data, np.dtype("<i4")).copy()
