"""A router process: the frontend with its HTTP and gRPC servers, in one event loop."""

import asyncio
import contextlib
import errno
import json
import secrets
import socket
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

import grpc.aio
import uvicorn
from grpc_health.v1 import health
from starlette.types import ASGIApp

from penstock.common.gguf.checkpoint import is_gguf
from penstock.common.gguf.documents import config_of
from penstock.common.rope_scaling import yarn_positions
from penstock.common.text.token_bytes import UnsupportedTokenizer
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.protos.serving.connection_guard import ConnectionGuard
from penstock.router.api.admin import admin_app
from penstock.router.api.auth import ApiKeys
from penstock.router.api.connection import BoundedConnection
from penstock.router.api.connection_limits import ConnectionLimits
from penstock.router.api.grpc import set_health, start_grpc
from penstock.router.api.http import CommonHeadersMiddleware, CorsMiddleware
from penstock.router.api.openai.routes import openai_app
from penstock.router.config import RouterConfig
from penstock.router.errors import ServingError
from penstock.router.frontend import Frontend
from penstock.router.helpers.fork_server import ForkServer
from penstock.router.helpers.pool import HelperPool
from penstock.router.helpers.settings import HelperSettings
from penstock.router.requests.generation_defaults import (
    GenerationDefaults,
    read_generation_defaults,
)
from penstock.router.requests.request import ModelLimits
from penstock.router.routing.dispatcher import Dispatcher, DispatcherLimits
from penstock.router.routing.placement.routing_strategies import policy_of
from penstock.router.routing.worker_registry import LivenessBounds

# Requests fail with UNAVAILABLE if no worker is available for this time.
NO_WORKER_TIMEOUT_SECONDS = 60.0
UNBOUNDED = 2**31 - 1
"""Limit of the context length if the model's configuration has none.

The smallest of the workers' limits then applies.
"""


class PortInUseError(OSError):
    """Raised if a port cannot be bound; the message contains the port."""


class RunningRouter:
    """A running router.

    It may be used only in the event loop in which `serve_router` was called.
    """

    def __init__(
        self,
        frontend: Frontend,
        http: "HttpServer",
        admin: "HttpServer",
        grpc_server: grpc.aio.Server,
        grpc_guard: ConnectionGuard,
        health_service: health.aio.HealthServicer,
        grpc_address: str,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._frontend = frontend
        self._http = http
        self._admin = admin
        self._grpc = grpc_server
        self._grpc_guard = grpc_guard
        self._health = health_service
        self._fork_server = fork_server
        self._tasks: set[asyncio.Task[None]] = set()
        self.http_address = http.address
        self.admin_address = admin.address
        self.grpc_address = grpc_address
        frontend.on_readiness(self._update_health)

    @property
    def frontend(self) -> Frontend:
        """The frontend behind both servers, for status and metrics."""
        return self._frontend

    async def set_workers(self, addresses: Mapping[str, str]) -> None:
        """Connect to exactly the workers in `addresses` (name to `host:port`)."""
        await self._frontend.set_workers(addresses)

    def worker_died(self, name: str) -> None:
        """Treat a worker as lost immediately, because its process is known to have exited."""
        self._frontend.worker_died(name)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait up to `seconds` for the running requests to end."""
        await self._frontend.drain(seconds)

    async def stop(self) -> None:
        """Close all servers and worker links. Open calls end with UNAVAILABLE."""
        self._grpc_guard.close()
        await self._frontend.stop()
        await asyncio.gather(self._grpc.stop(grace=1.0), self._http.stop(), self._admin.stop())
        if self._fork_server is not None:
            self._fork_server.close()

    def _update_health(self, why_not: str) -> None:
        task = asyncio.create_task(set_health(self._health, why_not))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def serve_router(
    config: RouterConfig, fork_server: ForkServer | None = None
) -> RunningRouter:
    """Start a router; if the start fails, stop everything that was started.

    Args:
        config: the router's configuration.
        fork_server: starts the helper processes; if None, the router starts its own fork server.

    Raises:
        UnsupportedTokenizer, ValueError: the model folder cannot be served.
        PortInUseError: a port cannot be bound.
    """
    forks = fork_server or ForkServer()
    own = forks if fork_server is None else None
    with contextlib.ExitStack() as undo:
        if own is not None:
            undo.callback(own.close)
        forks.start()  # the fork server loads its libraries while this process loads the tokenizer
        text = ModelTokenizer(config.model, config.chat_template)
        limits, defaults = read_model_limits(config, text), GenerationDefaults()
        if config.generation_config == "auto":
            defaults = read_generation_defaults(config.model, config.bounds)
        listener = undo.enter_context(listen(config.host, config.http_port))
        admin_listener = undo.enter_context(listen(config.admin_host, config.admin_port))
        dispatcher = Dispatcher(
            policy_of(config.routing),
            DispatcherLimits(
                max_queued=config.max_queued_requests,
                max_queued_tokens=config.max_queued_tokens,
                max_queued_cost=config.max_queued_cost,
                max_wait_seconds=config.max_wait_seconds or inf,
                ttft_slo_seconds=config.ttft_slo_seconds,
                tpot_slo_seconds=config.tpot_slo_seconds,
                # If queued requests start workers, only a request's own deadline limits its wait.
                no_worker_timeout_seconds=inf
                if config.wakes_workers
                else NO_WORKER_TIMEOUT_SECONDS,
                bounds=LivenessBounds(
                    lost_after=config.worker_timeout_seconds, stuck_after=config.stuck_seconds
                ),
            ),
        )
        check_port_is_free(config.host, config.grpc_port)
        helpers = await start_helpers(config, text, forks)
        undo.callback(helpers.close)
        tenants = ApiKeys(config.api_keys).tenant_names()
        frontend = Frontend(
            config, text, limits, dispatcher, secrets.token_hex(8), tenants, defaults, helpers
        )
        try:
            grpc_server, health_service = start_grpc(frontend)
            grpc_port = bind_grpc(grpc_server, config)
            await grpc_server.start()
        except BaseException:
            await frontend.stop()
            raise
        app: ASGIApp = openai_app(frontend)
        if config.allowed_origins:
            app = CorsMiddleware(app, config.allowed_origins)
        bounds, malformed = (config.bounds, config.connections), frontend.metrics.malformed
        refused = frontend.metrics.refused_connections
        limited = ConnectionLimits(*bounds, malformed, refused["HTTP"])
        http = HttpServer(app, limited, config.host, listener)
        limited = ConnectionLimits(*bounds, malformed, refused["admin"])
        admin = HttpServer(admin_app(frontend), limited, config.admin_host, admin_listener)
        max_per_address = config.connections.max_connections_per_address
        guard = ConnectionGuard(grpc_port, max_per_address, refused["gRPC"])
        undo.pop_all()
    address = _address(config.host, grpc_port)
    return RunningRouter(frontend, http, admin, grpc_server, guard, health_service, address, own)


async def start_helpers(
    config: RouterConfig, tokenizer: ModelTokenizer, fork_server: ForkServer
) -> HelperPool:
    """Start the helper processes of a router.

    Raises:
        UnsupportedTokenizer: the model's chat template is not valid.
    """
    settings = HelperSettings(tokenizer.chat_template, config.helpers, config.bounds)
    pool = HelperPool(fork_server, settings)
    try:
        await pool.start()
    except ServingError as error:
        source = config.model if config.chat_template is None else "chat_template"
        raise UnsupportedTokenizer(f"{source}: {error.message}") from error
    return pool


def read_model_limits(config: RouterConfig, tokenizer: ModelTokenizer) -> ModelLimits:
    """Return the limits from the model's configuration and from `config.max_model_len`."""
    model = config.model
    own = config_of(model) if is_gguf(model) else _read_json(model / "config.json")
    inner = own.get("text_config")
    if isinstance(inner, dict):  # the configurations of multimodal models nest these fields
        own = {**own, **inner}
    longest = own.get("max_position_embeddings")
    if isinstance(longest, int):
        longest = max(longest, yarn_positions(own))
    lengths = [longest, own.get("n_positions"), config.max_model_len]
    known = [length for length in lengths if isinstance(length, int)]
    vocab = own.get("vocab_size")
    return ModelLimits(
        config.served_name,
        min(known, default=UNBOUNDED),
        vocab if isinstance(vocab, int) else tokenizer.vocab_size,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent} has no config.json: give the path of a checkpoint folder"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not contain a JSON object: download it again")
    return found


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket for a host and a port.

    Raises:
        PortInUseError: the port cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A small buffer limits kernel memory per slow client; accepted connections inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        action = "choose another host or port"
        if error.errno == errno.EADDRINUSE:
            action = "stop the process that uses the port, or choose another port"
        raise PortInUseError(
            f"cannot listen on {host} port {port}: {error.strerror}; {action}"
        ) from error
    return listener


def check_port_is_free(host: str, port: int) -> None:
    """Raise `PortInUseError` if a port is taken. gRPC's own error would be less clear."""
    listen(host, port).close()


def bind_grpc(server: grpc.aio.Server, config: RouterConfig) -> int:
    """Bind the gRPC server to a port and return the port.

    Raises:
        PortInUseError: the port cannot be bound.
    """
    try:
        return int(server.add_insecure_port(_address(config.host, config.grpc_port)))
    except RuntimeError as error:
        raise PortInUseError(
            f"cannot listen on {config.host} port {config.grpc_port}: gRPC failed to bind the "
            "port, although it was free just before. Another process, such as a second router, may "
            "have taken the port: choose another port, or stop that process"
        ) from error


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class EmbeddedServer(uvicorn.Server):
    """A uvicorn server that leaves signal handling to the caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """An HTTP server: uvicorn as a task of the running event loop."""

    def __init__(
        self, app: ASGIApp, limits: ConnectionLimits, host: str, listener: socket.socket
    ) -> None:
        self.address = _address(host, listener.getsockname()[1])
        self._server = EmbeddedServer(
            uvicorn.Config(
                CommonHeadersMiddleware(app),
                http=BoundedConnection.with_limits(limits),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=2,
            )
        )
        self._task = asyncio.create_task(self._server.serve([listener]), name="http server")

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._task
