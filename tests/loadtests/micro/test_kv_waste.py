"""The measurement of allocated KV memory that is not written."""

from penstock.loadtests.bench.workload import TRACE_BLOCK, TraceRow
from penstock.loadtests.micro.kv_waste import Options, measure, sequences


def test_one_sequence_wastes_the_unwritten_slots_of_its_last_block() -> None:
    waste = measure([TraceRow(0.0, 30, 4)], Options(num_blocks=8))
    # Steps 1 to 4 leave 30, 31, 32 and 33 positions written. Step 4 then releases all blocks.
    assert waste.steps == 4
    assert waste.unwritten == 2 + 1 + 0
    assert waste.allocated == 3 * 32
    assert waste.most == 2 / 32


def test_requests_share_the_prefixes_of_the_trace_and_all_end() -> None:
    rows = [TraceRow(0.0, 600, 3, (1, 2)), TraceRow(0.0, 700, 3, (1, 3)), TraceRow(0.0, 20, 3)]
    first, second, third = sequences(rows, 4096)
    assert first.tokens[:TRACE_BLOCK] == second.tokens[:TRACE_BLOCK]
    assert first.tokens[TRACE_BLOCK:] != second.tokens[TRACE_BLOCK : len(first.tokens)]
    assert [len(new.tokens) for new in (first, second, third)] == [600, 700, 20]
    waste = measure(rows, Options(num_blocks=256, max_sequences=2))
    assert 0 < waste.fraction < 0.1
