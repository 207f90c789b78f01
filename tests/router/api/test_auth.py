"""Every route and gRPC method that a router registers needs an API key, except health."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from penstock.protos import inference_pb2
from penstock.router.api.admin import admin_app
from penstock.router.api.openai.routes import openai_app
from penstock.router.api.page import page_files
from penstock.router.config import RouterConfig
from tests.support.api_keys import EVERY_ROLE, user_keys
from tests.support.openai_errors import check_form
from tests.support.served_router import serving
from tests.support.stub_worker import StubWorker

# The page's files need no key, because they contain no data. The page itself sends the key.
PUBLIC_PATHS = {"/health", "/health/", *page_files()}
PUBLIC = {(method, path) for method in ("GET", "HEAD") for path in PUBLIC_PATHS}
PUBLIC_METHODS = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
WRONG = ("", "Bearer", "Bearer another", "Bearer a-key-", "Basic a-key", "a-key")
WRONG_HEADERS: list[dict[str, str]] = [
    *({"authorization": value} for value in WRONG),
    *({"x-api-key": value} for value in ("", "another", "Bearer a-key")),
    {"authorization": "Bearer another", "x-api-key": "a-key"},
]


def keyed(config: RouterConfig) -> RouterConfig:
    return replace(config, api_keys=(*user_keys("a-key"), *EVERY_ROLE))


async def test_every_http_route_of_both_ports_needs_a_key_except_health(
    config: RouterConfig,
) -> None:
    async with serving(keyed(config), StubWorker()) as served, httpx.AsyncClient() as http:
        answered = set()
        for app, url in (
            (openai_app(served.router.frontend), served.url),
            (admin_app(served.router.frontend), served.admin_url),
        ):
            routes: list[Any] = app.routes
            assert routes
            for route in routes:
                for method in route.methods:
                    for headers in WRONG_HEADERS:
                        reply = await http.request(method, url + route.path, headers=headers)
                        if reply.status_code != 401:
                            answered.add((method, route.path))
                        elif method != "HEAD":
                            assert check_form(reply)["type"] == "authentication_error"
        assert answered == PUBLIC
        assert served.worker.submits == []


async def test_every_grpc_method_needs_a_key_except_health(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: set[str] = set()
    original = grpc.method_handlers_generic_handler

    def record(service: str, handlers: Mapping[str, Any]) -> grpc.GenericRpcHandler:
        registered.update(f"/{service}/{name}" for name in handlers)
        return original(service, handlers)

    monkeypatch.setattr(grpc, "method_handlers_generic_handler", record)
    async with (
        serving(keyed(config)) as served,
        grpc.aio.insecure_channel(served.router.grpc_address) as channel,
    ):
        service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
        declared = {f"/{service.full_name}/{method.name}" for method in service.methods}
        assert registered >= declared | PUBLIC_METHODS
        for method in registered - PUBLIC_METHODS:
            for header in WRONG:
                metadata = [("authorization", header)]
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await channel.unary_stream(method)(b"", metadata=metadata).read()
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
