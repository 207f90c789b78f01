"""Forced tokens: tokens that must follow a sampled token, because no other token is allowed.

They are appended to a sequence without being sampled. The next step computes them together with the
sampled token, like a chunk of a prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.workers.scheduling.scheduler_state import SchedulerState
from penstock.workers.scheduling.sequence import FinishReason, StepOutput
from penstock.workers.scheduling.table import SequenceTable

ForcedTokens: TypeAlias = Mapping[int, Sequence[int]]
"""Map from a table row to the tokens that must follow the row's sampled token."""

NO_FORCED: ForcedTokens = {}


def append_forced(state: SchedulerState, output: StepOutput, forced: ForcedTokens) -> StepOutput:
    """Append forced tokens to the rows of a committed step; return the output with these tokens.

    Stop at the token with which a sequence ends or yields. It is always correct to append fewer
    forced tokens, because later steps can sample only the same tokens. If there are too few forced
    tokens, append none: see `SchedulerConfig.forced_per_other_row`.

    Args:
        state: the scheduler, after the tokens of `output` were appended. Rows that are in another
            step in flight get no forced tokens.
        output: the output of the step.
        forced: the tokens to append.
    """
    table, busy = state.table, state.in_flight.rows
    outputs, rows = [output], output.rows
    lengths = np.array([len(forced.get(row, ())) for row in rows.tolist()], np.int32)
    lengths[(output.finishes != FinishReason.NONE) | np.isin(rows, busy)] = 0
    num_ended = np.count_nonzero(output.finishes != FinishReason.NONE)
    num_others = len(state.batch.rows) - num_ended - np.count_nonzero(lengths)
    if lengths.sum() < state.limits.forced_per_other_row * num_others:
        return output
    at = np.arange(len(rows))
    for number in range(int(lengths.max(initial=0))):
        goes_on = table.num_tokens[rows[at]] < table.yield_len[rows[at]]
        at = at[goes_on & (number < lengths[at])]
        if not at.size:
            break
        tokens = [forced[row][number] for row in rows[at].tolist()]
        outputs.append(_append_one(table, output, at, tokens))
        at = at[outputs[-1].finishes == FinishReason.NONE]
    if len(outputs) == 1:
        return output
    state.fast_path.invalidate()
    return _joined(outputs)


def _append_one(
    table: SequenceTable, output: StepOutput, at: npt.NDArray[np.intp], tokens: Sequence[int]
) -> StepOutput:
    """Append one token to each of the rows `output.rows[at]`; return the output of these rows."""
    rows, drawn = output.rows[at], np.array(tokens, np.int32)
    indices = table.num_tokens[rows] - table.num_prompt[rows]
    finishes = table.append(rows, drawn)
    table.decode_len[rows] = table.num_tokens[rows] - table.num_computed[rows]
    keys = [output.keys[index] for index in at.tolist()]
    return StepOutput(keys, output.choices[at], rows, indices, drawn, finishes)


def _joined(outputs: Sequence[StepOutput]) -> StepOutput:
    names = ("choices", "rows", "indices", "tokens", "finishes")
    columns = {name: np.concatenate([getattr(each, name) for each in outputs]) for name in names}
    return replace(outputs[0], keys=[key for each in outputs for key in each.keys], **columns)
