"""WorkerLoad: the properties that are derived from its counts."""

from penstock.common.worker_load import NO_LOAD, WorkerLoad


def test_held_blocks_are_the_used_leased_and_reserved_ones() -> None:
    load = WorkerLoad(
        used_blocks=20, leased_blocks=10, reserved_blocks=5, cached_blocks=25, free_blocks=40
    )
    assert (load.held_blocks, load.num_blocks, load.kv_usage) == (35, 100, 0.35)


def test_usage_is_zero_before_the_first_report() -> None:
    assert (NO_LOAD.held_blocks, NO_LOAD.kv_usage) == (0, 0.0)
