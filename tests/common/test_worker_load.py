"""WorkerLoad: what is derived from its counts."""

from penstock.common.worker_load import NO_LOAD, WorkerLoad


def test_held_blocks_are_those_that_no_other_sequence_can_take() -> None:
    load = WorkerLoad(
        used_blocks=20, leased_blocks=10, reserved_blocks=5, cached_blocks=25, free_blocks=40
    )
    assert (load.held_blocks, load.num_blocks, load.kv_usage) == (35, 100, 0.35)


def test_a_worker_that_reported_nothing_uses_nothing() -> None:
    assert (NO_LOAD.held_blocks, NO_LOAD.kv_usage) == (0, 0.0)
