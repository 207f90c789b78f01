"""What the leading rank has the others do, as bytes: step plans, and blocks to send or to take."""

from dataclasses import dataclass

import numpy as np

from penstock.protos import ranks_pb2 as wire
from penstock.workers.scheduling.sequence import Ints, StepPlan
from penstock.workers.transfer.shards import Rectangle

_ARRAYS = (
    *("rows", "tokens", "positions", "query_starts", "context_lens", "block_tables", "slots"),
    *("copies", "forks", "scored"),
)


def encode(plan: StepPlan) -> bytes:
    """A plan whose tokens are known."""
    arrays = {name: _bytes(getattr(plan, name)) for name in _ARRAYS}
    message = wire.Plan(number=plan.number, samples=plan.samples.tobytes(), **arrays)
    return wire.Order(plan=message).SerializeToString()


@dataclass(frozen=True, slots=True)
class MoveBlocks:
    """That a rank is to take this part of these blocks from the leading rank, or to send it."""

    rank: int
    blocks: Ints
    part: Rectangle
    take: bool

    def encode(self) -> bytes:
        part = self.part
        message = wire.Blocks(
            rank=self.rank,
            blocks=_bytes(self.blocks),
            first_layer=part.first_layer,
            last_layer=part.last_layer,
            first_head=part.first_head,
            last_head=part.last_head,
        )
        order = wire.Order(take=message) if self.take else wire.Order(send=message)
        return order.SerializeToString()


def decode(data: bytes) -> StepPlan | MoveBlocks:
    """What was encoded."""
    order = wire.Order.FromString(data)
    kind = order.WhichOneof("body")
    if kind == "plan":
        return _plan(order.plan)
    moved = order.take if kind == "take" else order.send
    part = Rectangle(moved.first_layer, moved.last_layer, moved.first_head, moved.last_head)
    return MoveBlocks(moved.rank, _ints(moved.blocks), part, kind == "take")


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


def most_bytes(max_sequences: int, max_tokens: int, num_columns: int) -> int:
    """That a plan takes with at most so many sequences, tokens and blocks a sequence."""
    # Rows, starts, lengths, copies, forks and samples of sequences; four of tokens.
    return 4 * (max_sequences * (num_columns + 8) + 4 * max_tokens) + 1024


def _bytes(array: Ints) -> bytes:
    return np.ascontiguousarray(array, np.dtype("<i4")).tobytes()


def _ints(data: bytes) -> Ints:
    # Its own memory, as a plan's always is: compiled kernels take no other.
    return np.frombuffer(data, np.dtype("<i4")).copy()
