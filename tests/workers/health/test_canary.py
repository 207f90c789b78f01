"""A worker that shows that it computes: when canaries are sent, and that no total counts them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.model_runner import ModelRunner
from penstock.workers.health.canary import KEY, LivenessMonitor
from penstock.workers.scheduling.sequence import StepPlan
from penstock.workers.service import grpc_service
from penstock.workers.service.grpc_service import RunningWorker, serve_worker
from tests.support.attached import Attached, greedy
from tests.support.engines import greedy_sequence, run_greedy, run_out
from tests.support.tiny import tiny_checkpoint

PROMPT = list(range(3, 40))


def test_one_is_sent_after_so_long_without_a_step_and_no_second_beside_it() -> None:
    vigil = LivenessMonitor(10.0, 0.0)
    assert not vigil.due(9.0)
    vigil.computed(9.0)
    assert not vigil.due(18.0)
    assert vigil.due(19.0)
    assert not vigil.due(100.0), "one is under way"
    vigil.ended(100.0)
    assert (vigil.silence(101.0), vigil.due(101.0)) == (92.0, False), "it was in vain"
    assert vigil.due(110.0)


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from(["look", "step", "end"])), max_size=60))
def test_while_it_is_looked_after_silence_has_a_canary_under_way(
    story: list[tuple[float, str]],
) -> None:
    now, vigil, flies, last = 0.0, LivenessMonitor(10.0, 0.0), False, 0.0
    for later, what in story:
        now += later
        if what == "step":
            vigil.computed(now)
            last = now
        elif what == "end" and flies:
            vigil.ended(now)
            flies, last = False, now
        else:
            sent = vigil.due(now)
            assert sent == (not flies and now - last >= 10.0)
            flies = flies or sent


# ------------------------------------------------------------------ the engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_engine(checkpoint: Path) -> Engine:
    return Engine(WorkerConfig("w", checkpoint, kv_cache_mib=1, threads=1))


def test_no_total_counts_it_and_nothing_is_left_of_it(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    answer = run_greedy(engine, PROMPT, 5)
    before = engine.load()
    engine.submit_canary()
    assert len(run_out(engine)[KEY]) == 2
    assert engine.load() == before
    engine.batcher.check()
    assert run_greedy(engine, PROMPT, 5) == answer
    after = engine.load()
    assert after.prompt_tokens_cached - before.prompt_tokens_cached == 32, "two blocks of 16"


def test_beside_others_it_changes_neither_their_tokens_nor_their_count(checkpoint: Path) -> None:
    alone, beside = make_engine(checkpoint), make_engine(checkpoint)
    answer = run_greedy(alone, PROMPT, 5)
    beside.submit(greedy_sequence("one", PROMPT, 5))
    beside.submit_canary()
    answers = run_out(beside)
    assert answers["one"] == answer
    assert len(answers[KEY]) == 2
    assert beside.batcher.load() == alone.batcher.load()
    assert beside.load().num_steps == alone.load().num_steps


# ------------------------------------------------------------------ the service


@pytest_asyncio.fixture
async def worker(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningWorker]:
    monkeypatch.setattr(grpc_service, "_CHECK_SECONDS", 0.02)
    running = await serve_worker(
        WorkerConfig("w", checkpoint, kv_cache_mib=1, threads=1, canary_seconds=0.2)
    )
    yield running
    await running.stop()


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.01)


async def health(worker: RunningWorker) -> int:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest())).status)


@pytest.mark.slow
async def test_an_idle_worker_shows_that_it_computes_and_routers_hear_nothing_of_it(
    worker: RunningWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await Attached(worker.address).open()
    await router.submit(1, PROMPT, greedy(3))
    await router.answer(1)
    await until(lambda: worker.silence > 0.19)
    await until(lambda: worker.silence < 0.1)
    said = len(router.heard)
    await until(lambda: worker.silence > 0.19)
    await until(lambda: worker.silence < 0.1)
    assert not [each for each in router.heard[said:] if each.HasField("step")]
    assert (router.load.running, router.load.prompt_tokens_computed) == (0, len(PROMPT))
    while await health(worker) != health_pb2.HealthCheckResponse.SERVING:
        await asyncio.sleep(0.02)  # a machine without a core for it makes it ill for a moment
    await until_ill_and_well(worker, monkeypatch)
    await router.close()


async def until_ill_and_well(worker: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that gives no numbers is seen, though nobody asks anything of it."""
    compute = ModelRunner.run

    def ill(self: ModelRunner, plan: StepPlan, *more: object) -> object:
        return compute(self, plan, *more) * np.nan  # type: ignore[arg-type]

    status = health_pb2.HealthCheckResponse
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "run", ill)
        await until(lambda: worker.silence > 0.7)
        while await health(worker) == status.SERVING:
            await asyncio.sleep(0.02)
    await until(lambda: worker.silence < 0.2)
    while await health(worker) != status.SERVING:
        await asyncio.sleep(0.02)
