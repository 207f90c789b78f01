"""Step plans as bytes, on their way from the leading rank to the others."""

import numpy as np

from penstock.protos import ranks_pb2 as wire
from penstock.workers.scheduling.sequence import Ints, StepPlan

_ARRAYS = (
    *("rows", "tokens", "positions", "query_starts", "context_lens", "block_tables", "slots"),
    *("copies", "forks", "scored"),
)


def encode(plan: StepPlan) -> bytes:
    """A plan whose tokens are known."""
    arrays = {name: _bytes(getattr(plan, name)) for name in _ARRAYS}
    message = wire.Plan(number=plan.number, samples=plan.samples.tobytes(), **arrays)
    return message.SerializeToString()


def decode(data: bytes) -> StepPlan:
    """What `encode` was given; the arrays cannot be written."""
    message = wire.Plan.FromString(data)
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
        samples=np.frombuffer(message.samples, np.bool_),
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
    return np.frombuffer(data, np.dtype("<i4"))
