"""Sources of copy-on-write are held until the step that copies them has been computed.

If a source were released earlier, a KV transfer could reserve its block and overwrite it before the
planned step has copied it.
"""

import pytest

from penstock.workers.scheduling.kv_pool import State
from penstock.workers.scheduling.sequence import Reserved
from tests.support.batcher_bench import Bench, sequence

SYSTEM = list(range(10))  # two full blocks of four tokens, and two further tokens


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("num_short", [0, 1])
def test_transfer_that_begins_before_a_copy_does_not_overwrite_its_source(
    num_stages: int, num_short: int
) -> None:
    """Plan a step that copies a block. Before this step runs, a KV transfer reserves blocks.

    The transfer needs `num_available + 1 - num_short` blocks.
    """
    bench = Bench(num_blocks=12, watermark=0, max_batched_tokens=40, num_stages=num_stages)
    bench.batcher.submit(sequence("first", [*SYSTEM, 50, 51, 52], 2))
    bench.run()
    second = sequence("second", [*SYSTEM, 60], 2)
    bench.batcher.submit(second)
    plan = bench.batcher.plan()
    assert plan is not None
    assert len(plan.copies) == 1
    bench.batcher.check()
    bench.batcher.events()
    num_tokens = 4 * (bench.batcher.pool.num_available + 1 - num_short)
    moved = sequence("moved", list(range(100, 100 + num_tokens)), 2, source_len=num_tokens - 1)
    bench.batcher.submit(moved)
    if (ahead := bench.batcher.plan()) is not None:
        bench.batcher.withdraw(ahead)
    reserved = [each for each in bench.batcher.events() if isinstance(each, Reserved)]
    # With `num_short` 0, a block is missing, and the transfer waits.
    assert len(reserved) == num_short
    for each in reserved:
        bench.model.poison(each.blocks)  # as if the transfer had already written its blocks
    bench.commit(plan)
    bench.batcher.check()
    assert bench.batcher.pool.state[plan.copies[0, 0]] == State.CACHED
    for _ in range(8):  # run the rest of `second`; `moved` never gets its KV
        bench.step()
    bench.expect(second)
