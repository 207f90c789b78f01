"""SchedulerConfig: refused sequences and limits, and sequences that only just fit."""

import pytest

from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.sequence import NeverFits, QueueFull
from tests.support.batcher_bench import Bench, limits, sequence


def test_sequence_that_can_never_fit_is_refused() -> None:
    batcher = Batcher(limits(num_blocks=8))
    for new, word in (
        (sequence("a", [], 3), "prompt"),
        (sequence("a", [1] * 64, 3), "no room for an answer"),
        (sequence("a", [1] * 20, 30), "KV cache"),
        (sequence("a", [1], 2, log=(1, 2)), "max_tokens"),
        (sequence("a", [1, 2], 2, source_len=2), "the KV transfer offers 2 positions"),
    ):
        with pytest.raises(NeverFits, match=word):
            batcher.submit(new)
    assert batcher.load().queued == 0


def test_longest_sequence_that_fits_runs_by_itself() -> None:
    bench = Bench(num_blocks=8)
    new = sequence("a", [1] * 20, 13)  # 33 tokens, but the last one needs no KV: 32 positions
    bench.batcher.submit(new)
    bench.run()
    bench.expect(new)


def test_full_queue_and_repeated_keys_are_refused() -> None:
    batcher = Batcher(limits(max_queued=2))
    batcher.submit(sequence(0, [1]))
    with pytest.raises(ValueError, match="already"):
        batcher.submit(sequence(0, [1]))
    batcher.submit(sequence(1, [1]))
    with pytest.raises(QueueFull):
        batcher.submit(sequence(2, [1]))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 0},
        {"max_model_len": 1},
        {"max_sequences": 17},
        {"watermark": -1},
        {"lease_fraction": 1.5},
    ],
)
def test_invalid_limits_are_refused(changes: dict[str, int | float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        limits(**changes)
