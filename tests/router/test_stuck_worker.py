"""A served router with a worker that sends heartbeats but completes no step."""

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
async def test_request_of_a_stuck_worker_moves_and_the_worker_is_reported(
    config: RouterConfig,
) -> None:
    stuck, other = StubWorker("w0"), StubWorker("w1")
    stuck.stepping.clear()
    reports: list[tuple[str, str, str]] = []

    async def beat() -> None:
        while True:
            stuck.send(pb.ToRouter(heartbeat=pb.Heartbeat()))
            await asyncio.sleep(0.2)

    async with serving(replace(config, step_timeout_seconds=2.0), stuck, other) as served:
        served.router.frontend.on_stuck_worker = lambda *report: reports.append(report)
        beating = asyncio.create_task(beat())
        async with httpx.AsyncClient(timeout=60) as client:
            calls = [
                asyncio.create_task(
                    client.post(f"{served.url}/v1/completions", json={"prompt": "hi"})
                )
                for _ in range(2)
            ]
            await until(lambda: stuck.runs, "the stuck worker received no request")
            replies = await asyncio.gather(*calls)
        beating.cancel()
    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[0].json()["choices"] == replies[1].json()["choices"]
    ((name, address, why),) = reports
    assert (name, address) == ("w0", stuck.address)
    assert why.startswith("the worker responds, but has completed no step for ")


@pytest.mark.parametrize("step_timeout_seconds", [1.0, 4.0, 30.0])
def test_stuck_timeout_exceeds_the_step_and_transfer_timeouts(
    config: RouterConfig, step_timeout_seconds: float
) -> None:
    bound = replace(config, step_timeout_seconds=step_timeout_seconds).stuck_seconds
    assert bound >= 1.5 * step_timeout_seconds
    assert bound > 1.5 * WorkerConfig("w0", Path("m")).transfer_seconds
