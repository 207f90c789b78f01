"""SequenceTable: rows are filled, extended and reused."""

import numpy as np

from penstock.common.sampling_params import SamplingParams
from penstock.workers.scheduling.sequence import NEVER, FinishReason, Ints, NewSequence
from penstock.workers.scheduling.table import SequenceTable, ragged_arange


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def add(table: SequenceTable, num_tokens: int, params: SamplingParams) -> int:
    tokens = np.arange(num_tokens, dtype=np.int32)
    return table.add(NewSequence("a", tokens.tolist(), num_tokens, params), 0, tokens, NEVER)


def test_ragged_arange_counts_each_row_from_zero() -> None:
    assert ragged_arange(ints(2, 0, 3)).tolist() == [0, 1, 0, 1, 2]
    assert ragged_arange(ints()).tolist() == []
    assert ragged_arange(ints(2)).dtype == np.int32


def test_reused_row_keeps_nothing_of_its_previous_sequence() -> None:
    table = SequenceTable(1, 16, 4)
    row = add(table, 9, SamplingParams(stop_token_ids=tuple(range(90, 99)), max_tokens=3))
    table.add_blocks(ints(row), ints(3), ints(7, 8, 9))
    table.remove(row)
    assert add(table, 2, SamplingParams(max_tokens=1000)) == row
    assert table.num_blocks[row] == table.num_computed[row] == 0
    assert table.max_len[row] == 16
    assert table.append(ints(row), ints(95)).tolist() == [FinishReason.NONE]
    assert table.tokens[row, :3].tolist() == [0, 1, 95]


def test_blocks_are_appended_row_by_row() -> None:
    table = SequenceTable(3, 32, 4)
    rows = ints(*(add(table, 3, SamplingParams()) for _ in range(3)))
    table.add_blocks(rows, ints(1, 0, 2), ints(5, 6, 7))
    table.add_blocks(rows, ints(1, 1, 0), ints(8, 9))
    assert [table.blocks(row).tolist() for row in rows.tolist()] == [[5, 8], [9], [6, 7]]
    assert table.num_missing_blocks(rows, ints(9, 4, 4)).tolist() == [1, 0, 0]


def test_stop_token_takes_precedence_over_length() -> None:
    table = SequenceTable(2, 32, 4)
    rows = ints(
        *(add(table, 3, SamplingParams(max_tokens=1, stop_token_ids=(5,))) for _ in range(2))
    )
    assert table.append(rows, ints(5, 6)).tolist() == [FinishReason.STOP, FinishReason.LENGTH]


def test_computing_again_below_the_known_logprobs_requests_none_twice() -> None:
    table = SequenceTable(2, 32, 4)
    rows = ints(*(add(table, 7, SamplingParams(prompt_logprobs=0)) for _ in range(2)))
    table.prompt_known[rows] = 1, 6
    table.record_scored(rows, ints(3, 1))
    assert table.prompt_known[rows].tolist() == [4, 6]
    positions = np.tile(np.arange(6, dtype=np.int32), 2)
    assert table.scored(rows, ints(6, 6), positions).tolist() == [
        *(3, 4, 5),
        11,
    ]
