"""Serializes the messages from rank 0 to the other ranks: step plans and KV transfer moves."""

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


CAPTURE_GRAPHS = b"\x2a\x00"
"""The serialized order to capture CUDA graphs, `Order(capture=Capture())`."""


def encode(plan: StepPlan, ahead: bool = False) -> bytes:
    """Serialize a plan. If `ahead` is False, the plan must have its tokens: see `StepPlan.fill`.

    Args:
        ahead: Whether rank 0 sends the tokens to the other ranks from device to device.
    """
    arrays = {name: _bytes(getattr(plan, name)) for name in _ARRAYS}
    message = wire.Plan(number=plan.number, samples=plan.samples.tobytes(), ahead=ahead, **arrays)
    return wire.Order(plan=message).SerializeToString()


def decode(data: bytes) -> StepPlan | wire.Move | wire.Capture:
    """Deserialize a message: a step plan, a KV transfer move, or the order to capture graphs.

    If a plan has `ahead`, its tokens are sent in another way: see `encode`.
    """
    order = wire.Order.FromString(data)
    match order.WhichOneof("body"):
        case "plan":
            return _plan(order.plan)
        case "capture":
            return order.capture
        case _:
            return order.move


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
        ahead=message.ahead,
    )


def max_plan_bytes(max_sequences: int, max_tokens: int, num_columns: int) -> int:
    """Return the maximum size of a serialized plan, in bytes; KV transfer moves are smaller.

    Args:
        num_columns: Maximum number of blocks per sequence.
    """
    # Every number has 4 bytes. Each sequence has `num_columns` numbers of the block table.
    # Other numbers of a sequence: row, query start, context length, copies (2), forks (2), sample.
    # Each token has 4 numbers: token, position, slot and scored.
    return 4 * (max_sequences * (num_columns + 8) + 4 * max_tokens) + _ORDER_BYTES


def _bytes(array: Ints) -> bytes:
    return np.ascontiguousarray(array, np.dtype("<i4")).tobytes()


def _ints(data: bytes) -> Ints:
    # Copy, because compiled kernels need writable arrays and a buffer of bytes is read-only.
    return np.frombuffer(data, np.dtype("<i4")).copy()
