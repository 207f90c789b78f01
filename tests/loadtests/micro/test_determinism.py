"""The measurement of the cost of deterministic mode."""

from penstock.loadtests.micro.ab_runner import SHIPPED_MODEL
from penstock.loadtests.micro.determinism import Options, cells, run_round
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine


def test_both_engines_compute_every_cell() -> None:
    config = WorkerConfig("w", SHIPPED_MODEL, threads=1, kv_cache_mib=16)
    engines = [Engine(config), Engine(config)]
    all_cells = cells(Options(batch=3, input_len=8, output_len=4, long_len=30))
    for number in range(2):
        ratios = run_round(engines, all_cells, number)
        assert list(ratios) == [name for name, *_ in all_cells]
        assert min(ratios.values()) > 0
    computed = [engine.load().prompt_tokens_computed for engine in engines]
    assert computed == [2 * (3 * 8 + 8 + 30)] * 2
