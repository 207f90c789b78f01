"""Canaries: an idle worker decodes canaries, and totals do not count their tokens."""

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
from penstock.workers.health.canary import KEY, LivenessMonitor, make_canary
from penstock.workers.scheduling.sequence import StepPlan
from penstock.workers.service import grpc_service
from penstock.workers.service.grpc_service import RunningWorker, serve_worker
from tests.support.attached_router import AttachedRouter, greedy
from tests.support.engines import greedy_sequence, run_greedy, run_out
from tests.support.tiny import tiny_checkpoint

PROMPT = list(range(3, 40))


def test_canary_is_due_after_idle_time_and_only_one_at_a_time() -> None:
    monitor = LivenessMonitor(10.0, 0.0)
    assert not monitor.due(9.0)
    monitor.computed(9.0)
    assert not monitor.due(18.0)
    assert monitor.due(19.0)
    assert not monitor.due(100.0), "a canary is in flight"
    monitor.ended(100.0)
    assert (monitor.silence(101.0), monitor.due(101.0)) == (92.0, False), "the canary failed"
    assert monitor.due(110.0)


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from(["look", "step", "end"])), max_size=60))
def test_canary_is_due_exactly_if_idle_and_none_is_in_flight(
    events: list[tuple[float, str]],
) -> None:
    now, monitor, in_flight, last = 0.0, LivenessMonitor(10.0, 0.0), False, 0.0
    for delay, event in events:
        now += delay
        if event == "step":
            monitor.computed(now)
            last = now
        elif event == "end" and in_flight:
            monitor.ended(now)
            in_flight, last = False, now
        else:
            sent = monitor.due(now)
            assert sent == (not in_flight and now - last >= 10.0)
            in_flight = in_flight or sent


# ------------------------------------------------------------------ the engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_engine(checkpoint: Path) -> Engine:
    return Engine(WorkerConfig("w", checkpoint, kv_cache_mib=1, threads=1))


def test_canary_is_not_counted_and_leaves_no_blocks(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    answer = run_greedy(engine, PROMPT, 5)
    before = engine.load()
    engine.submit(make_canary())
    assert len(run_out(engine)[KEY]) == 2
    assert engine.load() == before
    engine.batcher.check()
    assert run_greedy(engine, PROMPT, 5) == answer
    after = engine.load()
    cached = after.prompt_tokens_cached - before.prompt_tokens_cached
    assert cached == len(PROMPT) - 1, "the canary evicted a block"


def test_canary_changes_neither_tokens_nor_counts_of_requests(checkpoint: Path) -> None:
    without_canary, with_canary = make_engine(checkpoint), make_engine(checkpoint)
    answer = run_greedy(without_canary, PROMPT, 5)
    with_canary.submit(greedy_sequence("one", PROMPT, 5))
    with_canary.submit(make_canary())
    answers = run_out(with_canary)
    assert answers["one"] == answer
    assert len(answers[KEY]) == 2
    assert with_canary.batcher.load() == without_canary.batcher.load()
    loads = [engine.load() for engine in (with_canary, without_canary)]
    assert loads[0].num_steps == loads[1].num_steps
    assert loads[0].step_tokens == loads[1].step_tokens == len(PROMPT) + 5
    assert loads[0].step_token_counts == loads[1].step_token_counts


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
async def test_idle_worker_decodes_canaries_that_routers_do_not_see(
    worker: RunningWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await AttachedRouter(worker.address).open()
    await router.submit(1, PROMPT, greedy(3))
    await router.answer(1)
    await until(lambda: worker.silence > 0.19)
    await until(lambda: worker.silence < 0.1)
    num_received = len(router.received)
    await until(lambda: worker.silence > 0.19)
    await until(lambda: worker.silence < 0.1)
    assert not [each for each in router.received[num_received:] if each.HasField("step")]
    assert (router.load.running, router.load.prompt_tokens_computed) == (0, len(PROMPT))
    while await health(worker) != health_pb2.HealthCheckResponse.SERVING:
        await asyncio.sleep(0.02)  # wait longer, because a busy machine may delay the canary
    await check_unhealthy_then_healthy(worker, monkeypatch)
    await router.close()


async def check_unhealthy_then_healthy(
    worker: RunningWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that an idle worker is unhealthy while its logits are NaN, and healthy afterwards."""
    compute = ModelRunner.run

    def run_with_nan(self: ModelRunner, plan: StepPlan, *more: object, **options: object) -> object:
        return compute(self, plan, *more, **options) * np.nan  # type: ignore[arg-type]

    status = health_pb2.HealthCheckResponse
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "run", run_with_nan)
        await until(lambda: worker.silence > 0.7)
        while await health(worker) == status.SERVING:
            await asyncio.sleep(0.02)
    await until(lambda: worker.silence < 0.2)
    while await health(worker) != status.SERVING:
        await asyncio.sleep(0.02)
