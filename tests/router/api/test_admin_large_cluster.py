"""/status, /metrics and /steps of large clusters do not delay the other calls of a router.

The fixture `callback_times` fails these tests if a callback takes too long.
"""

import random
from collections.abc import Mapping
from dataclasses import replace

import httpx
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from penstock.common.worker_load import WorkerLoad
from penstock.router.config import RouterConfig
from penstock.router.observability.snapshot import WorkerState, WorkerStats
from penstock.router.observability.step_records import StepColumns
from tests.support.served_router import Served, client_of, serving
from tests.support.stub_worker import StubWorker

NUM_WORKERS = 1024
NUM_STEPS = 4096
STEP_BOUNDS = [0.001 * 2**power for power in range(14)]
TOKEN_BOUNDS = [2.0**power for power in range(14)]
NAMES = [f"mixed-{number}" for number in range(NUM_WORKERS)]


def worker_state(number: int) -> WorkerState:
    load = WorkerLoad(
        running=number,
        used_blocks=number,
        free_blocks=4096,
        step_counts=(number,) * (len(STEP_BOUNDS) + 1),
        step_token_counts=(number,) * (len(TOKEN_BOUNDS) + 1),
        step_seconds=0.25 * number,
    )
    stats = WorkerStats(load, 64, 16, STEP_BOUNDS, 4096, TOKEN_BOUNDS)
    return WorkerState(NAMES[number], "mixed", "ready", number, stats)


def enlarge(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the router report `NUM_WORKERS` workers."""
    frontend = served.router.frontend
    workers = [worker_state(number) for number in range(NUM_WORKERS)]
    state = replace(frontend.take_snapshot(), workers=workers)
    monkeypatch.setattr(frontend, "take_snapshot", lambda: state)


async def test_readiness_does_not_need_the_status_of_each_worker(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router checks its readiness 10 times per second; 1,024 statuses take 1 ms."""

    def workers() -> None:
        raise AssertionError("the statuses of all workers were made")

    async with serving(config, StubWorker()) as served:
        frontend = served.router.frontend
        monkeypatch.setattr(frontend, "workers", workers)
        monkeypatch.setattr(frontend._dispatcher, "workers", workers)
        assert frontend.why_not_ready() == ""
        await served.router.set_workers({})
        assert frontend.why_not_ready() == "no worker is connected"


async def test_status_lists_all_workers(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(config) as served, client_of(served) as http:
        enlarge(served, monkeypatch)
        status = (await http.get("/status")).json()
    assert [each["worker"] for each in status["workers"]] == NAMES
    last = status["workers"][-1]
    assert last.keys() == {"worker", "role", "state", "requests", "numbers", "indexed_blocks"}
    numbers = last["numbers"]
    assert (numbers["running"], numbers["places"], numbers["blocks"]["free"]) == (1023, 64, 4096)
    assert numbers["steps"] == {
        "bounds": STEP_BOUNDS,
        "counts": [1023] * (len(STEP_BOUNDS) + 1),
        "seconds": 0.25 * 1023,
    }


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text"])
async def test_metrics_list_all_workers_under_one_header(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch, accept: str
) -> None:
    both = replace(config, vllm_metrics=True)
    async with serving(both) as served, client_of(served) as http:
        enlarge(served, monkeypatch)
        text = (await http.get("/metrics", headers={"accept": accept})).text
    parse = openmetrics_families if accept else text_string_to_metric_families
    families = {family.name: family for family in parse(text)}
    headers = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(headers) == len(set(headers)) == len(families)
    for name, label, num_samples in (
        ("penstock_worker_up", "worker", 1),
        ("penstock_step_seconds", "worker", len(STEP_BOUNDS) + 3),
        ("vllm:iteration_tokens_total", "engine", len(TOKEN_BOUNDS) + 3),
    ):
        found = [sample.labels[label] for sample in families[name].samples]
        assert found == [worker for worker in NAMES for _ in range(num_samples)]


async def test_steps_of_many_workers(config: RouterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = random.Random(7)
    floats = [numbers.random() for _ in range(NUM_STEPS)]
    integers = [numbers.randrange(10**6) for _ in range(NUM_STEPS)]
    steps = StepColumns(integers, floats, floats, integers, integers, integers, floats)
    records = dict.fromkeys(NAMES[:16], steps)

    async def step_records() -> Mapping[str, StepColumns]:
        return records

    async with serving(config) as served, httpx.AsyncClient(base_url=served.admin_url) as http:
        monkeypatch.setattr(served.router.frontend, "step_records", step_records)
        found = (await http.get("/steps")).json()
    assert list(found) == NAMES[:16]
    assert found["mixed-3"] == {
        "number": integers,
        "ended": floats,
        "seconds": floats,
        "tokens": integers,
        "sequences": integers,
        "positions": integers,
        "pairs": floats,
    }
