"""A worker with too few blocks reports preemptions and the tokens of steps to two routers."""

from functools import partial
from pathlib import Path

import pytest

from penstock.workers.config import WorkerConfig
from penstock.workers.service.grpc_service import serve_worker
from tests.support.attached_router import AttachedRouter, greedy
from tests.support.tiny import tiny_checkpoint

NUM_REQUESTS, NUM_PROMPT, NUM_TOKENS = 24, 40, 150


def is_idle(router: AttachedRouter) -> bool:
    return not router.load.running


@pytest.mark.parametrize("plan_ahead", [False, True])
async def test_totals_equal_the_sums_over_requests_and_steps(
    tmp_path: Path, plan_ahead: bool
) -> None:
    config = WorkerConfig(
        "w0", tiny_checkpoint(tmp_path), kv_cache_mib=1, max_sequences=32, plan_ahead=plan_ahead
    )
    worker = await serve_worker(config)
    routers = [await AttachedRouter(worker.address).open(name) for name in ("a", "b")]
    for request in range(NUM_REQUESTS):
        prompt = [3 + (7 * request + at) % 100 for at in range(NUM_PROMPT)]
        await routers[request % 2].submit(request, prompt, greedy(NUM_TOKENS))
    for request in range(NUM_REQUESTS):
        assert len(await routers[request % 2].answer(request)) == NUM_TOKENS
    preempted = []
    for number, router in enumerate(routers):
        await router.until(partial(is_idle, router))
        steps = [message.step for message in router.received if message.HasField("step")]
        ours = [request for step in steps for request in step.preempted]
        assert all(request % 2 == number for request in ours)
        preempted += ours
    for router in routers:
        load = router.load
        assert len(preempted) == load.preemptions > 0
        num_generated = NUM_REQUESTS * NUM_TOKENS
        assert load.step_tokens == load.prompt_tokens_computed + num_generated
        assert load.steps == sum(load.step_token_counts)
        await router.close()
    await worker.stop()
