"""The follower's watchdog: it ignores compilation during warm-up, and detects a later hang."""

import threading
from pathlib import Path

import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.workers.engine.engine import Engine
from penstock.workers.health.watchdog import ProgressTimer, Watchdog
from penstock.workers.parallel.rendezvous import LocalStore
from penstock.workers.rank.follower import SERVING_KEY, Follower
from penstock.workers.scheduling.sequence import NewSequence
from tests.support.ranks import in_threads, make_model, rank_config

pytestmark = pytest.mark.slow


class CountingTimer(ProgressTimer):
    """A timer that counts how often it has been started."""

    def __init__(self) -> None:
        super().__init__("test", 1.0)
        self.num_starts = 0

    def progressed(self, predicted: float = 0.0) -> None:
        self.num_starts += 1


def step(engine: Engine, key: str) -> None:
    # For prompt logprobs, all ranks together compute the logits of the prompt.
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    engine.submit(NewSequence(key, [5, 6, 7], 3, params, prompt_known=1))
    while engine.step().output is not None:
        pass


def test_follower_is_checked_only_after_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, timer = make_model(tmp_path, "llama"), CountingTimer()
    watchdog = Watchdog("test", 1.0)
    monkeypatch.setattr(watchdog, "timer", lambda name: timer)
    counts: list[int] = []
    followers: list[Follower] = []
    made = threading.Event()

    def work(rank: int, store: LocalStore) -> None:
        config = rank_config(model, (2, 1, 1), rank=rank)
        if rank:
            followers.append(Follower(config, store, lambda done, total: None, watchdog))
            made.set()
            followers[0].run()
            return
        engine = Engine(config, store=store)
        assert made.wait(60)
        step(engine, "warm-up")
        counts.append(timer.num_starts)
        store.set(SERVING_KEY, "1")
        assert followers[0]._is_checked.wait(60)
        step(engine, "request")
        engine.stop()

    in_threads(2, work)
    assert counts == [0]
    assert timer.num_starts > 0
