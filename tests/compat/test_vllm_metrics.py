"""Metrics with vLLM's names: exact values after OpenAI requests.

The tests cover the rows "metric" of `review_rows.txt`, a review of the OpenAI API.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.common.worker_load import WorkerLoad
from penstock.protos import worker_pb2 as pb
from penstock.router.config import RouterConfig
from tests.support.openai_client import HELLO, connect, serving_with_client
from tests.support.served_router import Served, client_of, serving, until
from tests.support.stub_worker import StubWorker

pytestmark = pytest.mark.asyncio


def samples_of(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


async def scrape(served: Served) -> list[tuple[str, Mapping[str, str], float]]:
    async with client_of(served) as http:
        return list(samples_of((await http.get("/metrics")).text))


def loads(served: Served) -> list[WorkerLoad]:
    """Return the loads that the router has from its workers."""
    numbers = [each.numbers for each in served.router.frontend.take_snapshot().workers]
    return [each.load for each in numbers if each is not None]


async def test_counts_and_parameters_of_requests(config: RouterConfig) -> None:
    async with serving_with_client(replace(config, vllm_metrics=True)) as (served, client):
        for number in range(1, 4):
            await client.chat.completions.create(
                model="stub", messages=HELLO, n=number, max_tokens=10 * number
            )
        values = {
            name: value
            for name, labels, value in await scrape(served)
            if name.startswith("vllm:") and "le" not in labels and labels["engine"] == "router-0"
        }
    for name in ("params_n", "params_max_tokens", "inference_time_seconds", "generation_tokens"):
        assert values[f"vllm:request_{name}_count"] == 3, name
    assert values["vllm:request_params_n_sum"] == 1 + 2 + 3
    assert values["vllm:request_params_max_tokens_sum"] == 10 + 20 + 30
    num_tokens = 1 * 10 + 2 * 20 + 3 * 30
    assert values["vllm:generation_tokens_total"] == num_tokens
    assert values["vllm:request_generation_tokens_sum"] == num_tokens
    times = [values[f"vllm:request_{name}_time_seconds_sum"] for name in ("prefill", "decode")]
    assert values["vllm:request_inference_time_seconds_sum"] == pytest.approx(sum(times))


async def test_sizes_of_the_cache_are_labels(config: RouterConfig) -> None:
    async with serving_with_client(replace(config, vllm_metrics=True)) as (served, _):
        await until(lambda: served.router.frontend.take_snapshot().workers[0].numbers)
        samples = await scrape(served)
    infos = [(labels, value) for name, labels, value in samples if name.endswith("_config_info")]
    sizes = {"block_size": "16", "num_gpu_blocks": "4096"}
    assert infos == [({"model_name": "stub", "engine": "w0", **sizes}, 1)]


async def test_steps_are_counted_by_their_tokens_once(config: RouterConfig) -> None:
    """Workers send totals, so a router that reconnects does not count a step twice."""

    async def counts(served: Served) -> list[float]:
        """Return the values of the buckets, the count and the sum."""
        found = await scrape(served)
        return [
            value
            for name, labels, value in found
            if name.startswith("vllm:iteration_tokens_total_") and labels["engine"] == "w0"
        ]

    async with serving_with_client(replace(config, vllm_metrics=True)) as (served, _):
        router, worker = served.router, served.worker

        async def connect_again(load: pb.Load) -> None:
            worker.welcome.load.CopyFrom(load)
            num_streams = len(worker.hellos)
            router.worker_died(worker.name)
            await until(lambda: len(worker.hellos) > num_streams and router.frontend.workers())

        worker.welcome.step_token_bounds.extend([1, 8])
        load = pb.Load(steps=6, step_token_counts=[3, 2, 1], step_tokens=40)
        await connect_again(load)
        assert await counts(served) == [3, 5, 6, 6, 40]
        load.MergeFrom(pb.Load(steps=7, step_tokens=41))
        load.step_token_counts[0] += 1
        worker.send(pb.ToRouter(step=pb.Step(load=load)))
        await until(lambda: loads(served) and loads(served)[0].num_steps == 7)
        assert await counts(served) == [4, 6, 7, 7, 41]
        await connect_again(load)
        assert await counts(served) == [4, 6, 7, 7, 41]
        worker.welcome.incarnation = "w0-2"  # a restart resets the totals
        await connect_again(pb.Load(step_token_counts=[0, 0, 0]))
        assert await counts(served) == [0, 0, 0, 0, 0]


async def test_waiting_requests_are_counted_by_reason(config: RouterConfig) -> None:
    async with serving_with_client(replace(config, vllm_metrics=True)) as (served, client):
        served.worker.reject = pb.Rejected(reason="full")
        sending = asyncio.create_task(client.completions.create(model="stub", prompt="hi"))
        load = pb.Load(queued=2, running=4, receiving=1, awaiting_grammar=3)
        served.worker.send(pb.ToRouter(step=pb.Step(load=load)))
        await until(lambda: loads(served) and loads(served)[0].queued == 2)
        await until(lambda: served.router.frontend.take_snapshot().waiting == 1)
        found = await scrape(served)
        sending.cancel()
    values = {
        (name.removeprefix("vllm:num_requests_"), labels["engine"], labels.get("reason")): value
        for name, labels, value in found
        if name.startswith("vllm:num_requests_")
    }
    assert values == {
        ("running", "w0", None): 3,  # the sequence that waits for its KV transfer is not counted
        ("waiting", "w0", None): 2 + 1 + 3,
        ("waiting_by_reason", "w0", "capacity"): 2,
        ("waiting_by_reason", "w0", "deferred"): 1 + 3,
        ("waiting", "router-0", None): 1,
        ("waiting_by_reason", "router-0", "capacity"): 1,
        ("waiting_by_reason", "router-0", "deferred"): 0,
    }


async def test_preemptions_of_a_request_are_counted_over_its_workers(config: RouterConfig) -> None:
    """Preempt one request twice, then once more on a second worker; do not preempt another one."""
    first, second = StubWorker("w0"), StubWorker("w1")
    config = replace(config, vllm_metrics=True)
    async with serving(config, first) as served, connect(served) as client:
        first.stepping.clear()
        sending = asyncio.create_task(client.completions.create(model="stub", prompt="hi"))
        await until(lambda: first.submits)
        number = first.submits[0].request
        step = pb.Step(preempted=[number, number + 99, number], load=pb.Load(steps=5))
        first.send(pb.ToRouter(step=step))
        await until(lambda: loads(served) and loads(served)[0].num_steps == 5)
        async with second:
            second.stepping.clear()
            await served.router.set_workers({"w1": second.address})  # w0 is lost
            await until(lambda: second.submits)
            assert (second.submits[0].request, second.submits[0].attempt) == (number, 2)
            second.send(pb.ToRouter(step=pb.Step(preempted=[number])))
            second.stepping.set()
            await sending
            await client.completions.create(model="stub", prompt="hi")
            found = await scrape(served)
    name = "vllm:request_num_preemptions"
    values = {
        (sample.removeprefix(name), labels.get("le")): value
        for sample, labels, value in found
        if sample.startswith(name)
    }
    assert (values["_count", None], values["_sum", None]) == (2, 3)
    bounds = [bound for part, bound in values if part == "_bucket" and bound is not None]
    assert [*map(float, bounds)] == [0, 1, 2, 3, 4, 5, 10, 20, float("inf")]
    assert [values["_bucket", bound] for bound in bounds if float(bound) <= 3] == [1, 1, 1, 2]
