"""/v1/requests/ID/explain and gRPC Explain: content, visibility, and other routers."""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc, worker_pb2
from penstock.protos.worker_codec import num_prompt_tokens, unpack_tokens
from penstock.router.api.explain import TRAILER, peer_address
from penstock.router.config import RouterConfig
from penstock.router.observability.snapshot import RouterState
from tests.support.api_keys import EVERY_ROLE, METRICS, OPERATOR, user_keys
from tests.support.served_router import Served, client_of, serving
from tests.support.stub_worker import StubWorker

KEYS = (*user_keys("first-user", "second-user"), *EVERY_ROLE)
BODY = {"prompt": "a-secret-prompt", "max_tokens": 3}


def stub_of(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


async def complete(http: httpx.AsyncClient, **body: object) -> str:
    """Complete a prompt; return the id of the request."""
    reply = await http.post("/v1/completions", json=BODY | body)
    assert reply.status_code == 200
    return reply.headers["x-request-id"]


async def explain(http: httpx.AsyncClient, name: str) -> tuple[int, dict[str, Any]]:
    reply = await http.get(f"/v1/requests/{name}/explain")
    return reply.status_code, reply.json()


def phases(explanation: dict[str, Any]) -> dict[str, float]:
    return {each["phase"]: each["seconds"] for each in explanation["times"]}


async def test_explanation_says_where_the_request_ran_without_its_text(
    config: RouterConfig,
) -> None:
    peers: dict[str, StubWorker] = {}
    workers = [StubWorker("p0", "prefill", peers=peers), StubWorker("d0", "decode", peers=peers)]
    async with serving(config, *workers) as served, client_of(served) as http:
        name = await complete(http)
        status, body = await explain(http, name)
        assert status == 200
        assert (body["request_id"], body["router"], body["left_out"]) == (name, "router-0", 0)
        (one,) = body["requests"]
        assert (one["tenant"], one["state"], one["finish_reason"]) == (
            *("anonymous", "done", "length"),
        )
        size = num_prompt_tokens(workers[0].submits[0])
        assert (one["prompt_tokens"], one["completion_tokens"]) == (size, 3)
        assert sum(phases(one).values()) == pytest.approx(one["seconds"])
        events = {event["kind"]: event for event in one["events"]}
        placed = events["placed"]
        assert (placed["worker"], placed["other_worker"]) == ("p0", "d0")
        assert placed["detail"] == "apart: unmeasured"
        assert {each["worker"] for each in placed["candidates"]} == {"p0", "d0"}
        assert events["submitted"]["worker"] == "d0"
        assert "transfer_ended" in events
        assert "secret" not in json.dumps(body)
        tokens = ", ".join(map(str, unpack_tokens(workers[0].submits[0].prompt)[:4]))
        assert tokens not in json.dumps(body)


async def test_call_with_several_prompts_and_a_client_id_is_explained_whole(
    config: RouterConfig,
) -> None:
    async with serving(config, StubWorker()) as served, client_of(served) as http:
        body = BODY | {"prompt": ["one", "three"]}
        await http.post("/v1/completions", json=body, headers={"x-request-id": "my/own id"})
        status, found = await explain(http, "my%2Fown%20id")
        assert status == 200
        sizes = [num_prompt_tokens(submit) for submit in served.worker.submits]
        assert [each["prompt_tokens"] for each in found["requests"]] == sizes
        assert len(sizes) == 2


async def test_only_its_tenant_and_operators_see_an_explanation(config: RouterConfig) -> None:
    async with serving(replace(config, api_keys=KEYS), StubWorker()) as served:
        async with client_of(served, "first-user") as http:
            name = await complete(http)
            status, body = await explain(http, name)
            assert (status, body["requests"][0]["tenant"]) == (200, "key-1")
            assert (await explain(http, "unknown"))[0] == 404
        for key, expected in (("second-user", 404), (OPERATOR, 200), (METRICS, 403)):
            async with client_of(served, key) as http:
                assert (await explain(http, name))[0] == expected
        async with grpc.aio.insecure_channel(served.router.grpc_address) as channel:
            for key, code in (
                ("first-user", None),
                ("second-user", grpc.StatusCode.NOT_FOUND),
                (OPERATOR, None),
            ):
                metadata = [("authorization", f"Bearer {key}")]
                call = stub_of(channel).Explain(
                    pb.ExplainRequest(request_id=name), metadata=metadata
                )
                if code is None:
                    assert [each.tenant for each in (await call).requests] == ["key-1"]
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await call
                assert refusal.value.code() is code


async def test_operators_port_explains_to_operators_only(config: RouterConfig) -> None:
    async with (
        serving(replace(config, api_keys=KEYS), StubWorker()) as served,
        client_of(served, "first-user") as http,
        httpx.AsyncClient(base_url=served.admin_url) as admin,
    ):
        name = await complete(http)
        for key, expected in (("first-user", 403), (METRICS, 403), (OPERATOR, 200)):
            admin.headers["authorization"] = f"Bearer {key}"
            assert (await explain(admin, name))[0] == expected


@contextlib.asynccontextmanager
async def two_routers(config: RouterConfig) -> AsyncIterator[tuple[Served, Served]]:
    """Run two routers that have each other's addresses, as if from the supervisor."""
    async with (
        serving(replace(config, name="router-0"), StubWorker("w0")) as first,
        serving(replace(config, name="router-1"), StubWorker("w1")) as second,
    ):
        states = [
            RouterState(f"router-{number}", "ready", grpc=served.router.grpc_address)
            for number, served in enumerate((first, second))
        ]
        first.router.frontend.routers = second.router.frontend.routers = states
        yield first, second


async def test_any_router_forwards_to_the_one_that_served_the_request(
    config: RouterConfig,
) -> None:
    async with two_routers(replace(config, api_keys=KEYS)) as (first, second):
        async with client_of(first, "first-user") as http:
            name = await complete(http)
        for key, expected in (("first-user", 200), ("second-user", 404), (OPERATOR, 200)):
            async with client_of(second, key) as http:
                status, body = await explain(http, name)
                assert status == expected
                if expected == 200:
                    assert body["router"] == "router-0"
                    assert body["requests"][0]["events"][1]["worker"] == "w0"


async def test_key_in_the_header_of_anthropic_is_forwarded(config: RouterConfig) -> None:
    async with two_routers(replace(config, api_keys=KEYS)) as (first, second):
        async with client_of(first, "first-user") as http:
            name = await complete(http)
        for key, expected in (("first-user", 200), ("second-user", 404), (OPERATOR, 200)):
            async with client_of(second) as http:
                http.headers["x-api-key"] = key
                status, body = await explain(http, name)
                assert status == expected
                if expected == 200:
                    assert body["router"] == "router-0"


async def test_silent_router_is_named(config: RouterConfig) -> None:
    async with serving(config, StubWorker()) as served, client_of(served) as http:
        served.router.frontend.routers = [
            RouterState("router-0", "ready", grpc=served.router.grpc_address),
            RouterState("router-1", "ready", grpc="127.0.0.1:1"),
            RouterState("router-2", "down", grpc="127.0.0.1:1"),
        ]
        status, body = await explain(http, "unknown")
        assert status == 503
        assert "router-1" in body["error"]["message"]
        assert "router-2" not in body["error"]["message"]


@pytest.mark.parametrize(
    ("grpc_address", "node", "expected"),
    [
        ("0.0.0.0:9000", "10.0.0.7", "10.0.0.7:9000"),
        ("[::]:9000", "10.0.0.7", "10.0.0.7:9000"),
        ("10.0.0.8:9000", "10.0.0.7", "10.0.0.8:9000"),
        ("0.0.0.0:9000", "", "0.0.0.0:9000"),
    ],
)
def test_router_on_all_interfaces_is_reached_at_its_node(
    grpc_address: str, node: str, expected: str
) -> None:
    assert peer_address(RouterState("r", "ready", grpc=grpc_address, node=node)) == expected


async def test_grpc_call_ends_with_the_short_form(config: RouterConfig) -> None:
    async with (
        serving(config, StubWorker()) as served,
        grpc.aio.insecure_channel(served.router.grpc_address) as channel,
    ):
        request = pb.GenerateRequest(
            text="a-secret-prompt", sampling=pb.Sampling(max_tokens=3), request_id="mine"
        )
        call = stub_of(channel).Generate(request)
        assert [reply async for reply in call]
        short = json.loads(dict(await call.trailing_metadata())[TRAILER])
        assert (short["router"], short["workers"]) == ("router-0", ["w0"])
        assert short["reasons"] == ["routing: cost"]
        assert short["ms"].keys() >= {"decode"}
        reply = await stub_of(channel).Explain(pb.ExplainRequest(request_id="mine"))
        assert [each.completion_tokens for each in reply.requests] == [3]


async def test_failed_grpc_call_ends_with_the_short_form_and_its_status(
    config: RouterConfig,
) -> None:
    worker = StubWorker()
    worker.reject = worker_pb2.Rejected(reason="too small", never=True)
    async with (
        serving(config, worker) as served,
        grpc.aio.insecure_channel(served.router.grpc_address) as channel,
    ):
        call = stub_of(channel).Generate(
            pb.GenerateRequest(text="hi", sampling=pb.Sampling(max_tokens=3))
        )
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            [reply async for reply in call]
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        short = json.loads(dict(await call.trailing_metadata())[TRAILER])
        assert short["workers"] == ["w0"]
