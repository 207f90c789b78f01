"""/metrics and /status over HTTP, with stub workers behind the router."""

import asyncio
import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from penstock.protos import worker_pb2 as pb
from penstock.router.config import RouterConfig
from penstock.router.observability.snapshot import (
    PoolScaling,
    RouterState,
    Scaling,
    ScalingDecision,
)
from tests.support.api_keys import EVERY_ROLE, METRICS, OPERATOR, user_keys
from tests.support.metrics import SERIES
from tests.support.served_router import ADMIN_PATHS, Served, client_of, serving, until
from tests.support.stub_worker import StubWorker

BODY = {"prompt": "hi", "max_tokens": 3}
LOAD = pb.Load(
    queued=2,
    queued_tokens=70,
    running=3,
    used_blocks=10,
    leased_blocks=4,
    reserved_blocks=2,
    cached_blocks=5,
    free_blocks=79,
    unwritten_slots=40,
    prompt_tokens_computed=300,
    prompt_tokens_cached=100,
    preemptions=6,
    steps=7,
    step_counts=[4, 2, 1],
    step_seconds=0.5,
    expert_imbalance=1.5,
)
CONTROL_BYTES = bytes([*range(32), 127])
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def values_of(families: Iterable[Metric]) -> Values:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


async def scrape(http: httpx.AsyncClient) -> Values:
    reply = await http.get("/metrics")
    assert reply.status_code == 200
    return values_of(text_string_to_metric_families(reply.text))


def value(values: Values, name: str, **labels: str) -> float:
    return values[f"penstock_{name}", tuple(sorted(labels.items()))]


def names(values: Values) -> set[str]:
    return {name for name, _ in values}


async def test_one_scrape_has_the_metrics_of_a_cluster(config: RouterConfig) -> None:
    peers: dict[str, StubWorker] = {}
    workers = [StubWorker("p0", "prefill", peers=peers), StubWorker("d0", "decode", peers=peers)]
    for worker in workers:
        worker.welcome.step_bounds.extend([0.01, 0.1])
        worker.welcome.step_token_bounds.extend([1, 16])
    async with serving(config, *workers) as served, client_of(served) as http:
        reply = await http.post("/v1/completions", json=BODY)
        assert reply.status_code == 200
        workers[1].send(pb.ToRouter(step=pb.Step(load=LOAD)))
        await until(lambda: served.router.frontend.take_snapshot().pools[0].running == 3)
        values = await scrape(http)
    assert names(values) >= SERIES
    assert value(values, "requests_waiting", pool="decode") == 2
    assert value(values, "tokens_waiting", pool="decode") == 70
    assert value(values, "workers_ready", pool="prefill") == 1
    assert value(values, "worker_up", worker="d0") == 1
    assert value(values, "requests_running", worker="d0", role="decode") == 3
    states = ("used", "leased", "reserved", "cached", "free")
    blocks = [value(values, "kv_blocks", worker="d0", state=state) for state in states]
    assert blocks == [10, 4, 2, 5, 79]
    assert value(values, "kv_waste_ratio", worker="d0") == 40 / 160
    assert value(values, "prompt_tokens_total", worker="d0") == 400
    assert value(values, "prefix_hit_tokens_total", worker="d0") == 100
    assert value(values, "preemptions_total", worker="d0") == 6
    assert value(values, "expert_imbalance_ratio", worker="d0") == 1.5
    assert ("penstock_expert_imbalance_ratio", (("worker", "p0"),)) not in values, (
        "it reported none"
    )
    steps = [value(values, "step_seconds_bucket", worker="d0", le=le) for le in ("0.01", "0.1")]
    assert steps == [4, 6]
    assert value(values, "step_seconds_count", worker="d0") == 7
    assert value(values, "step_seconds_sum", worker="d0") == 0.5
    assert value(values, "kv_transfer_seconds_count") == 1
    assert value(values, "time_to_first_token_seconds_count") == 1
    assert value(values, "inter_token_seconds_count") == 2
    assert not [name for name in names(values) if not name.startswith("penstock_")]
    assert value(values, "requests_finished_total", reason="length") == 1
    assert value(values, "requests_finished_total", reason="error") == 0
    assert value(values, "generated_tokens_total", tenant="anonymous") == 3


async def test_metrics_under_the_names_of_vllm(config: RouterConfig) -> None:
    worker = StubWorker()
    renamed = replace(config, vllm_metrics=True)
    async with serving(renamed, worker) as served, client_of(served) as http:
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        worker.send(pb.ToRouter(step=pb.Step(load=LOAD)))
        await until(lambda: served.router.frontend.take_snapshot().pools[0].running == 3)
        values = await scrape(http)

    def vllm_value(name: str, engine: str = "router-0", **labels: str) -> float:
        labels |= {"model_name": "stub", "engine": engine}
        return values[f"vllm:{name}", tuple(sorted(labels.items()))]

    assert vllm_value("num_requests_running", "w0") == 3
    assert (vllm_value("num_requests_waiting", "w0"), vllm_value("num_requests_waiting")) == (2, 0)
    assert (
        vllm_value("kv_cache_usage_perc", "w0") == vllm_value("gpu_cache_usage_perc", "w0") == 0.16
    )
    assert vllm_value("prefix_cache_queries_total", "w0") == 400
    assert vllm_value("prefix_cache_hits_total", "w0") == 100
    assert vllm_value("num_preemptions_total", "w0") == 6
    assert vllm_value("generation_tokens_total") == 3
    assert vllm_value("prompt_tokens_total") == vllm_value("request_prompt_tokens_sum") > 0
    assert vllm_value("request_success_total", finished_reason="length") == 1
    assert vllm_value("request_generation_tokens_sum") == 3
    assert vllm_value("time_per_output_token_seconds_count") == 2
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert vllm_value(f"{name}_seconds_count") == 1, name
    for name in ("prefill_time", "decode_time", "time_per_output_token"):
        assert vllm_value(f"request_{name}_seconds_count") == 1, name


async def test_names_of_vllm_are_the_same_in_both_formats(config: RouterConfig) -> None:
    worker = StubWorker()
    worker.welcome.step_token_bounds.extend([1, 16])
    config = replace(config, vllm_metrics=True)
    async with serving(config, worker) as served, client_of(served) as http:
        plain = await scrape(http)
        accept = {"accept": "application/openmetrics-text;version=1.0.0"}
        text = (await http.get("/metrics", headers=accept)).text
    families = openmetrics_families(text)  # type: ignore[no-untyped-call]
    assert names(values_of(families)) == names(plain)
    assert "vllm:num_requests_running" in names(plain)


async def test_load_metrics_of_a_lost_worker_are_removed(config: RouterConfig) -> None:
    worker = StubWorker()
    async with serving(config, worker) as served, client_of(served) as http:
        worker.send(pb.ToRouter(step=pb.Step(load=LOAD)))
        await until(lambda: served.router.frontend.take_snapshot().pools[0].running == 3)
        await worker.stop()
        await until(lambda: not served.router.frontend.workers())
        values = await scrape(http)
        assert value(values, "worker_up", worker="w0") == 0
        assert value(values, "workers_ready", pool="mixed") == 0
        assert [labels for _, labels in values if ("worker", "w0") in labels] == [
            (("worker", "w0"),)
        ]
        await served.router.set_workers({})
        assert ("worker", "w0") not in {pair for _, labels in await scrape(http) for pair in labels}


async def test_worker_without_step_bounds_does_not_break_the_scrape(
    config: RouterConfig,
) -> None:
    odd = StubWorker("odd")  # reports counts of step times, but no bounds of their buckets
    odd.welcome.step_token_bounds.extend([1, 16])  # bucket bounds of tokens per step, no counts
    async with serving(config, odd, StubWorker("even")) as served, client_of(served) as http:
        odd.send(pb.ToRouter(step=pb.Step(load=LOAD)))
        await until(lambda: served.router.frontend.take_snapshot().pools[0].running == 3)
        values = await scrape(http)
    assert value(values, "step_seconds_count", worker="odd") == 7
    assert value(values, "step_tokens_count", worker="odd") == 7
    workers = {dict(labels)["worker"] for name, labels in values if "step_tokens" in name}
    assert workers == {"odd"}
    assert value(values, "worker_up", worker="even") == 1


async def test_router_queue_counts_for_the_prefill_pool(
    config: RouterConfig,
) -> None:
    peers: dict[str, StubWorker] = {}
    workers = [StubWorker("p0", "prefill", peers=peers), StubWorker("d0", "decode", peers=peers)]
    for worker in workers:
        worker.reject = pb.Rejected(reason="full")
    async with serving(config, *workers) as served, client_of(served) as http:
        waiting = asyncio.create_task(
            http.post("/v1/completions", json={**BODY, "prompt": [7] * 20})
        )
        # The worker is full and rejects the request, so the router queues the request again.
        await until(lambda: served.router.frontend.take_snapshot().waiting == 1)
        decode, prefill = served.router.frontend.take_snapshot().pools
        assert (prefill.waiting, decode.waiting) == (1, 0)
        waiting.cancel()


async def test_router_queue_counts_for_the_pools_without_capacity(config: RouterConfig) -> None:
    peers: dict[str, StubWorker] = {}
    workers = [StubWorker("p0", "prefill", peers=peers), StubWorker("d0", "decode", peers=peers)]
    workers[1].welcome.num_blocks = 3
    workers[1].stepping.clear()
    async with serving(config, *workers) as served, client_of(served) as http:
        body = {**BODY, "prompt": [7] * 20}
        sending = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(3)]
        await until(lambda: served.router.frontend.take_snapshot().waiting == 2)
        decode, prefill = served.router.frontend.take_snapshot().pools
        assert (prefill.queued, decode.queued, prefill.queued_tokens) == (0, 2, 0)
        for each in sending:
            each.cancel()


async def test_each_request_is_logged_with_its_id_but_no_content(
    config: RouterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    body = {"prompt": "sesame", "max_tokens": 3}
    async with serving(config, StubWorker()) as served, client_of(served) as http:
        reply = await http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert reply.status_code == 200
    (fields,) = (vars(each)["fields"] for each in caplog.records if each.msg == "request")
    seconds = [fields.pop(f"{name}seconds") for name in ("queued_", "first_token_", "")]
    assert seconds == sorted(seconds)
    assert fields.pop("prompt_tokens") > 3
    assert fields == {
        "request": "mine",
        "tenant": "anonymous",
        "reason": "length",
        "answer_tokens": 3,
    }
    (up,) = (vars(each)["fields"] for each in caplog.records if each.msg == "worker_up")
    assert (up["worker"], up["role"]) == ("w0", "mixed")


SCALING = Scaling(
    [
        PoolScaling(
            *("mixed", 0, 4, 3, 2, 1, "12 requests wait", "doubling at most in 15 s", 1),
            terms={"queue": 6.5, "occupancy": 0.25},
        )
    ],
    [ScalingDecision(1e9, "mixed", "mixed: 1 to 3: 12 requests wait")],
)


async def test_autoscaling_is_shown_in_metrics_and_status(served: Served) -> None:
    served.router.frontend.scaling = SCALING
    async with client_of(served) as http:
        values, status = await scrape(http), (await http.get("/status")).json()
    assert value(values, "workers_desired", pool="mixed") == 3
    assert value(values, "workers_pending", pool="mixed") == 2
    assert value(values, "workers_given_up", pool="mixed") == 1
    assert value(values, "workers_required", pool="mixed", term="queue") == 6.5
    assert value(values, "workers_required", pool="mixed", term="occupancy") == 0.25
    assert status["scaling"]["pools"][0]["reason"] == "12 requests wait"
    assert status["scaling"]["decisions"][0]["text"] == "mixed: 1 to 3: 12 requests wait"


async def test_pool_without_workers_is_shown_with_its_queue(config: RouterConfig) -> None:
    waking = replace(config, wakes_workers=True)
    async with serving(waking) as served, client_of(served) as http:
        served.router.frontend.scaling = SCALING
        assert (await http.get("/health")).status_code == 200, (
            "the router is ready: it can queue requests"
        )
        sending = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await until(lambda: served.router.frontend.take_snapshot().waiting == 1)
        (pool,) = served.router.frontend.take_snapshot().pools
        assert (pool.pool, pool.workers, pool.queued) == ("mixed", 0, 1)
        async with StubWorker() as worker:
            await served.router.set_workers({worker.name: worker.address})
            assert (await sending).status_code == 200


async def test_requests_that_the_queue_refuses_are_not_counted(config: RouterConfig) -> None:
    keys = user_keys("first-key", "second-key")
    waking = replace(config, wakes_workers=True, max_queued_requests=2, api_keys=keys)
    async with (
        serving(waking) as served,
        client_of(served, "first-key") as first,
        client_of(served, "second-key") as second,
    ):
        frontend = served.router.frontend
        frontend.scaling = SCALING
        queued = [asyncio.create_task(first.post("/v1/completions", json=BODY)) for _ in range(2)]
        await until(lambda: frontend.take_snapshot().waiting == 2)
        for _ in range(3):
            assert (await first.post("/v1/completions", json=BODY)).status_code == 429
        state = frontend.take_snapshot()
        assert state.finished["overloaded"] == 0
        tokens = state.prompt_tokens
        assert tokens == state.prompt_tokens_by_tenant["key-1"] == state.waiting_tokens > 0
        other = asyncio.create_task(second.post("/v1/completions", json=BODY))
        await until(lambda: any(each.done() for each in queued))
        state = frontend.take_snapshot()
        assert state.finished["overloaded"] == 1, "it had been queued before another replaced it"
        assert state.prompt_tokens_by_tenant == {"key-1": tokens, "key-2": tokens / 2, "other": 0}
        async with StubWorker() as worker:
            await served.router.set_workers({worker.name: worker.address})
            replies = await asyncio.gather(*queued, other)
        assert sorted(each.status_code for each in replies) == [200, 200, 429]


async def test_tenant_label_is_the_name_of_its_key_and_never_the_key(
    config: RouterConfig,
) -> None:
    keyed = replace(config, api_keys=(*user_keys("first-key", "second-key"), *EVERY_ROLE))
    async with (
        serving(keyed, StubWorker()) as served,
        client_of(served, "second-key") as user,
        client_of(served, METRICS) as http,
    ):
        await user.post("/v1/completions", json=BODY)
        text = (await http.get("/metrics")).text
        values = values_of(text_string_to_metric_families(text))
        assert value(values, "generated_tokens_total", tenant="key-2") == 3
        assert value(values, "generated_tokens_total", tenant="key-1") == 0
        prompt = value(values, "prompt_tokens_by_tenant_total", tenant="key-2")
        assert prompt == value(values, "prompt_length_tokens_sum") > 0
        assert value(values, "prompt_tokens_by_tenant_total", tenant="key-1") == 0
        secrets = {
            "first-key",
            "second-key",
            OPERATOR,
            METRICS,
            *served.router.frontend.metrics._tenant_names,
        }
        assert not [secret for secret in secrets if secret in text]
        assert not [secret for secret in secrets if secret in (await http.get("/status")).text]


@pytest.mark.parametrize("path", ["/metrics", "/status"])
async def test_state_of_the_cluster_is_for_operators_and_scrapers(
    config: RouterConfig, path: str
) -> None:
    keyed = replace(config, api_keys=(*user_keys("first-key"), *EVERY_ROLE))
    async with serving(keyed) as served, client_of(served) as http:
        for key, code in (("", 401), ("first-key", 403), (METRICS, 200), (OPERATOR, 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            reply = await http.get(path, headers=headers)
            assert reply.status_code == code, key
            assert "first-key" not in reply.text


@pytest.mark.parametrize("path", ADMIN_PATHS)
async def test_port_of_clients_does_not_serve_operators(served: Served, path: str) -> None:
    async with httpx.AsyncClient(timeout=30) as http:
        for method in ("GET", "POST"):
            reply = await http.request(method, f"{served.url}{path}")
            assert reply.status_code == 404, method
        reply = await http.get(f"{served.admin_url}/v1/models")
        assert reply.status_code == 404


async def test_pages_of_other_origins_cannot_reach_the_operators_port(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.admin_url, timeout=30) as http:
        reply = await http.get("/status", headers={"host": "evil.example"})
        assert reply.status_code == 403


async def test_key_for_metrics_gives_no_use_of_the_model(config: RouterConfig) -> None:
    keyed = replace(config, api_keys=EVERY_ROLE)
    async with serving(keyed, StubWorker()) as served, client_of(served, METRICS) as http:
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models")):
            reply = await http.request(method, path, json=BODY)
            assert reply.status_code == 403
        assert "the role 'metrics', but this call needs the role 'operator' or 'user'" in reply.text
        assert METRICS not in reply.text


SECRET = "xyzzy-plugh"
SHORT = {"max_tokens": 2}
HOSTILE_REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/completions", {"prompt": SECRET, "model": f"{SECRET}-0"}),
    ("POST", "/v1/completions", {"prompt": SECRET, "model": f"{SECRET}-1"}),
    ("POST", "/v1/completions", {"prompt": SECRET, "max_tokens": 2, "user": SECRET}),
    ("POST", "/v1/completions", {"prompt": SECRET, "max_tokens": 2, "bad_words": [SECRET]}),
    ("POST", "/v1/completions", {"prompt": SECRET, "max_tokens": SECRET}),
    ("POST", "/v1/completions", {"prompt": SECRET + "\ud800", "max_tokens": 2}),
    ("POST", "/v1/completions", {"prompt": [SECRET], "stop": [SECRET], "max_tokens": 2}),
    ("POST", "/v1/completions", {"prompt": SECRET * 1000, "max_tokens": 2}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}]}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], **SHORT}),
    ("POST", "/role", {"worker": SECRET, "role": SECRET}),
    ("GET", f"/{SECRET}", {}),
    ("GET", f"/v1/models/{SECRET}", {}),
]
"""(method, path, body) of requests that try to get `SECRET` into logs and metric labels."""


async def send_hostile_requests(http: httpx.AsyncClient) -> None:
    for number, (method, path, body) in enumerate(HOSTILE_REQUESTS):
        headers = {"x-request-id": f"r-{number}", "content-type": "application/json"}
        content = json.dumps(body) if body else None
        reply = await http.request(method, path, content=content, headers=headers)
        assert reply.status_code != 500, reply.text
    bad = {"authorization": f"Bearer {SECRET}"}
    await http.post("/v1/completions", json=BODY, headers=bad)


async def test_steps_are_the_records_of_each_worker(config: RouterConfig) -> None:
    workers = [StubWorker("w0"), StubWorker("w1"), StubWorker("w2")]
    columns: dict[str, Any] = {"tokens": [5], "sequences": [1], "positions": [5], "pairs": [12.5]}
    workers[0].steps = pb.StepRecords(number=[1], ended=[2.5], seconds=[0.5], **columns)
    # Invalid: the columns have different lengths.
    workers[1].steps = pb.StepRecords(number=[1, 2], ended=[2.5])
    async with serving(config, *workers) as served, client_of(served) as http:
        reply = (await http.get("/steps")).json()
    assert reply["w0"] == {"number": [1], "ended": [2.5], "seconds": [0.5], **columns}
    assert all(column == [] for column in reply["w2"].values())
    assert "w1" not in reply


async def test_clients_cannot_create_metric_labels(config: RouterConfig) -> None:
    keyed = replace(config, api_keys=EVERY_ROLE, vllm_metrics=True)
    async with serving(keyed, StubWorker()) as served, client_of(served, OPERATOR) as http:
        before = (await scrape(http)).keys()
        await send_hostile_requests(http)
        after = (await scrape(http)).keys()
    assert {labels for _, labels in after} == {labels for _, labels in before}
    assert after == before


async def test_metric_names_end_in_their_unit(served: Served) -> None:
    async with client_of(served) as http:
        text = (await http.get("/metrics")).text
    units = ("seconds", "tokens", "bytes", "ratio", "blocks", "bytes_per_second")
    ups = ("worker_up", "router_up")
    counted = (
        "requests",
        "malformed_requests",
        "workers",
        "preemptions",
        "failovers",
        "tokens_waiting",
        "prompt_tokens",
    )
    events = (
        "kv_transfers_failed",
        "prefill_placements",
        "malformed_requests",
        "connections_refused",
    )
    for family in text_string_to_metric_families(text):
        name = family.name.removeprefix("penstock_")
        assert name.endswith(units) or name.startswith(counted + events + ups), name
        assert family.documentation.endswith("."), name
        if family.type == "counter":
            assert f"{family.name}_total" in text, name


async def test_no_text_from_clients_is_logged(
    config: RouterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    worker = StubWorker()
    async with serving(config, worker) as served, client_of(served) as http:
        await send_hostile_requests(http)
        worker.reject = pb.Rejected(reason="/no/such/place", never=True)
        reply = await http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 2})
        assert reply.status_code >= 400
    own_records = [
        each for each in caplog.records if not each.name.startswith(("httpx", "httpcore"))
    ]
    assert [each for each in own_records if each.msg == "request"], "no request was logged"
    lines = [f"{each.getMessage()} {vars(each)} {each.exc_text}" for each in own_records]
    assert not [line for line in lines if SECRET in line]


async def test_openmetrics_format_on_request(served: Served) -> None:
    async with client_of(served) as http:
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        reply = await http.get("/metrics", headers=accept)
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    families = openmetrics_families(reply.text)  # type: ignore[no-untyped-call]
    # The worker reports no bucket bounds for the histogram of tokens per step.
    expected = {name for name in SERIES if not name.startswith("penstock_step_tokens")}
    assert names(values_of(families)) >= expected


MEDIA_TYPES = st.sampled_from(["application/openmetrics-text", "text/plain", "*/*", ""]) | st.text()
PARAMETERS = st.sampled_from(
    ["version=1.0.0", "version=abc", "version=x", "version", "version=", "q=0", "escaping=y", "="]
) | st.text(max_size=8)
ACCEPTS = st.lists(
    st.builds(lambda kind, parts: ";".join([kind, *parts]), MEDIA_TYPES, st.lists(PARAMETERS)),
    max_size=3,
).map(",".join)


def test_any_accept_header_gets_metrics(config: RouterConfig) -> None:
    with asyncio.Runner() as runner:
        server = serving(config)
        served = runner.run(server.__aenter__())
        client = client_of(served)

        @settings(max_examples=100, deadline=None)
        @example("application/openmetrics-text;version=abc")
        @example("text/plain;version=x")
        @given(ACCEPTS)
        def check(accept: str) -> None:
            header = accept.encode("latin-1", "replace").translate(None, CONTROL_BYTES).strip()
            response = runner.run(client.get("/metrics", headers=[(b"accept", header)]))
            assert response.status_code == 200
            assert "penstock_failovers_total 0" in response.text

        try:
            check()
        finally:
            runner.run(client.aclose())
            runner.run(server.__aexit__(None, None, None))


async def test_status_before_any_worker_connects(config: RouterConfig) -> None:
    async with serving(config) as served, client_of(served) as http:
        status = (await http.get("/status")).json()
        assert status["not_ready"] == "no worker is connected"
        assert (status["pools"], status["workers"]) == ([], [])
        values = await scrape(http)
        assert value(values, "failovers_total") == 0


async def test_status_of_a_cluster(served: Served) -> None:
    async with client_of(served) as http:
        served.worker.send(pb.ToRouter(step=pb.Step(load=LOAD)))
        await until(lambda: served.router.frontend.take_snapshot().pools[0].running == 3)
        status = (await http.get("/status")).json()
    assert (status["model"], status["not_ready"], status["streams"]) == ("stub", "", 0)
    (pool,), (worker,) = status["pools"], status["workers"]
    assert pool == {
        "pool": "mixed",
        "workers": 1,
        "ready": 1,
        "running": 3,
        "waiting": 2,
        "waiting_tokens": 70,
        "queued": 0,
        "queued_tokens": 0,
    }
    assert (worker["worker"], worker["role"], worker["state"]) == ("w0", "mixed", "ready")
    assert worker["numbers"]["blocks"]["used"] == 10
    num_blocks = sum(worker["numbers"]["blocks"].values())
    assert worker["numbers"]["kv_tokens"] == num_blocks * 16
    assert (worker["numbers"]["block_size"], worker["numbers"]["max_batched_tokens"]) == (16, 512)


async def test_status_shows_the_slos(config: RouterConfig) -> None:
    limited = replace(config, ttft_slo_seconds=2.0, tpot_slo_seconds=0.15)
    for each, expected in ((config, (0.0, 0.0)), (limited, (2.0, 0.15))):
        async with serving(each) as served, client_of(served) as http:
            status = (await http.get("/status")).json()
            assert (status["ttft_slo_seconds"], status["tpot_slo_seconds"]) == expected


async def test_each_router_shows_the_queues_of_all_routers(config: RouterConfig) -> None:
    async with serving(config, StubWorker("m0")) as served, client_of(served) as http:
        served.router.frontend.routers = [
            RouterState("router-0", "ready", "a:1", "a:2"),
            RouterState(
                *("router-1", "ready", "a:3", "a:4", 9, 3, 70),
                queued={"mixed": 3},
                queued_tokens={"mixed": 70},
            ),
            RouterState("router-2", "down", "a:5", "a:6"),
        ]
        status = (await http.get("/status")).json()
        values = await scrape(http)
    (pool,) = status["pools"]
    assert (pool["waiting"], pool["waiting_tokens"]) == (3, 70)
    assert (pool["queued"], pool["queued_tokens"]) == (0, 0), "no request is queued at this router"
    assert value(values, "requests_waiting", pool="mixed") == 3
    assert value(values, "tokens_waiting", pool="mixed") == 70
    assert [value(values, "router_up", router=f"router-{n}") for n in range(3)] == [1, 1, 0]
    assert [(each["router"], each["http"], each["streams"]) for each in status["routers"]] == [
        ("router-0", "a:1", 0),
        ("router-1", "a:3", 9),
        ("router-2", "a:5", 0),
    ]
