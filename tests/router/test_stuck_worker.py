"""A worker that beats and makes no step, as a served router meets it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from penstock.protos import worker_pb2 as pb
from penstock.router.config import RouterConfig
from penstock.workers.config import WorkerConfig
from tests.support.served_router import serving, until
from tests.support.stub_worker import StubWorker


@pytest.mark.slow
async def test_its_request_goes_on_elsewhere_and_its_keeper_is_told(config: RouterConfig) -> None:
    stuck, other = StubWorker("w0"), StubWorker("w1")
    stuck.go.clear()
    told: list[tuple[str, str, str]] = []

    async def beat() -> None:
        while True:
            stuck.say(pb.ToRouter(heartbeat=pb.Heartbeat()))
            await asyncio.sleep(0.2)

    async with serving(replace(config, step_timeout_seconds=2.0), stuck, other) as served:
        served.router.frontend.on_stuck_worker = lambda *what: told.append(what)
        beating = asyncio.create_task(beat())
        async with httpx.AsyncClient(timeout=60) as client:
            calls = [
                asyncio.create_task(
                    client.post(f"{served.url}/v1/completions", json={"prompt": "hi"})
                )
                for _ in range(2)
            ]
            await until(lambda: stuck.holding, "one of them was for the one that is stuck")
            replies = await asyncio.gather(*calls)
        beating.cancel()
    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[0].json()["choices"] == replies[1].json()["choices"]
    ((name, address, why),) = told
    assert (name, address) == ("w0", stuck.address)
    assert why.startswith("it answers, but no step of it has ended for ")


@pytest.mark.parametrize("step_timeout_seconds", [1.0, 4.0, 30.0])
def test_what_another_router_receives_there_is_waited_for(
    config: RouterConfig, step_timeout_seconds: float
) -> None:
    bound = replace(config, step_timeout_seconds=step_timeout_seconds).stuck_seconds
    assert bound >= 1.5 * step_timeout_seconds
    assert bound > 1.5 * WorkerConfig("w0", Path("m")).transfer_seconds
