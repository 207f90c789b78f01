"""ClusterLoadMeter: sums over connected workers, and the age of its values."""

from types import SimpleNamespace
from typing import Any

from penstock.common.worker_load import WorkerLoad
from penstock.router.observability.cluster_load import MAX_AGE_SECONDS, ClusterLoadMeter


def link(block_size: int, load: WorkerLoad | None) -> Any:
    info = SimpleNamespace(block_size=block_size)
    return SimpleNamespace(info=info, load=load)


def test_usage_is_a_share_of_slots_and_waiting_requests_are_summed() -> None:
    small = WorkerLoad(queued=2, used_blocks=3, free_blocks=1)
    large = WorkerLoad(receiving=1, awaiting_grammar=4, leased_blocks=1, cached_blocks=5)
    unknown: Any = SimpleNamespace(info=None, load=None)
    links = [link(16, small), link(32, large), link(16, None), unknown]
    load = ClusterLoadMeter(lambda: links, lambda: 7, lambda: 0.0).read()
    assert load.kv_usage == (3 * 16 + 1 * 32) / (4 * 16 + 6 * 32)
    assert load.num_waiting == 7 + 2 + 1 + 4


def test_load_without_workers_is_zero_usage() -> None:
    assert ClusterLoadMeter(lambda: [], lambda: 2, lambda: 0.0).read() == (0.0, 2)


def test_load_is_measured_again_when_it_is_too_old() -> None:
    now, queued = [0.0], [1]
    meter = ClusterLoadMeter(lambda: [], lambda: queued[0], lambda: now[0])
    assert meter.read().num_waiting == 1
    queued[0], now[0] = 5, MAX_AGE_SECONDS
    assert meter.read().num_waiting == 1
    now[0] = 1.5 * MAX_AGE_SECONDS
    assert meter.read().num_waiting == 5
