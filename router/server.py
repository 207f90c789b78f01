"""One router process: the frontend with its HTTP and gRPC servers, in one event loop."""

import asyncio
import contextlib
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

from penstock.common.text.tokenizer import ModelTokenizer
from penstock.router.api.auth import ApiKeys
from penstock.router.api.connection import BoundedConnection
from penstock.router.api.grpc import set_health, start_grpc
from penstock.router.api.openai.routes import openai_app
from penstock.router.config import RouterConfig
from penstock.router.frontend import Frontend
from penstock.router.requests.request import ModelLimits
from penstock.router.routing.dispatcher import Dispatcher, DispatcherLimits
from penstock.router.routing.placement.policy import LeastLoaded
from penstock.router.routing.worker_registry import LivenessBounds

NO_WORKER_TIMEOUT_SECONDS = 60.0  # seconds; then a request that waits is told that nobody is there
UNBOUNDED = 2**31 - 1
"""The context of a model whose configuration names none: the workers' own bound decides."""


class PortInUseError(OSError):
    """A port cannot be listened on; the message says which and why."""


class RunningRouter:
    """A router that serves. All of it lives in the loop that `serve_router` was called in."""

    def __init__(
        self,
        frontend: Frontend,
        http: "HttpServer",
        grpc_server: grpc.aio.Server,
        health_service: health.aio.HealthServicer,
        grpc_address: str,
    ) -> None:
        self._frontend = frontend
        self._http = http
        self._grpc = grpc_server
        self._health = health_service
        self._tasks: set[asyncio.Task[None]] = set()
        self.http_address = http.address
        self.grpc_address = grpc_address
        frontend.on_readiness(self._update_health)

    @property
    def frontend(self) -> Frontend:
        """What the servers sit on: for status and metrics."""
        return self._frontend

    async def set_workers(self, addresses: Mapping[str, str]) -> None:
        """Keep streams to exactly these workers: name to host:port."""
        await self._frontend.set_workers(addresses)

    def worker_died(self, name: str) -> None:
        """A worker's process is known to be dead."""
        self._frontend.worker_died(name)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; give what runs so many seconds to end."""
        await self._frontend.drain(seconds)

    async def stop(self) -> None:
        """Close everything. Open calls end with an error that says so."""
        await self._frontend.stop()
        await asyncio.gather(self._grpc.stop(grace=1.0), self._http.stop())

    def _update_health(self, why_not: str) -> None:
        task = asyncio.create_task(set_health(self._health, why_not))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def serve_router(config: RouterConfig) -> RunningRouter:
    """Start a router.

    Raises `UnsupportedTokenizer` or `ValueError` for a model folder that cannot be served,
    `PortInUseError` for a port that cannot be listened on; nothing is left running then.
    """
    text = ModelTokenizer(config.model)
    limits = read_model_limits(config, text)
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(listen(config.host, config.http_port))
        dispatcher = Dispatcher(
            LeastLoaded(),
            DispatcherLimits(
                max_queued=config.max_queued_requests,
                max_queued_tokens=config.max_queued_tokens,
                ttft_slo_seconds=config.ttft_slo_seconds,
                # Where workers are made for what waits, its own deadline is its patience.
                no_worker_timeout_seconds=inf
                if config.wakes_workers
                else NO_WORKER_TIMEOUT_SECONDS,
                bounds=LivenessBounds(
                    lost_after=config.worker_timeout_seconds, stuck_after=config.stuck_seconds
                ),
            ),
        )
        check_port_is_free(config.host, config.grpc_port)
        tenants = ApiKeys(config.api_keys).tenant_names()
        frontend = Frontend(config, text, limits, dispatcher, secrets.token_hex(8), tenants)
        try:
            grpc_server, health_service = start_grpc(frontend)
            grpc_port = bind_grpc(grpc_server, config)
            await grpc_server.start()
        except BaseException:
            await frontend.stop()
            raise
        http = HttpServer(config, frontend, listener)
        undo.pop_all()
    return RunningRouter(
        frontend, http, grpc_server, health_service, _address(config.host, grpc_port)
    )


def read_model_limits(config: RouterConfig, tokenizer: ModelTokenizer) -> ModelLimits:
    """The bounds that the model's own configuration sets."""
    path = config.model / "config.json"
    own = _read_json(path)
    inner = own.get("text_config")
    if isinstance(inner, dict):  # models of several kinds of input keep them there
        own = {**own, **inner}
    lengths = [own.get("max_position_embeddings"), own.get("n_positions"), config.max_model_len]
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
            f"{path.parent} holds no config.json: is it a checkpoint folder?"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket, or `PortInUseError` in one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # What a client that does not read may hold in the kernel; connections inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise PortInUseError(
            f"cannot listen on {host} port {port}: {error.strerror}. "
            "Choose another port, or end what uses it"
        ) from error
    return listener


def check_port_is_free(host: str, port: int) -> None:
    """`PortInUseError` if nothing could listen there: gRPC itself would say so less clearly."""
    listen(host, port).close()


def bind_grpc(server: grpc.aio.Server, config: RouterConfig) -> int:
    """Bind the server; the port that it got."""
    try:
        return int(server.add_insecure_port(_address(config.host, config.grpc_port)))
    except RuntimeError as error:
        raise PortInUseError(f"cannot listen on {config.host} port {config.grpc_port}") from error


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class EmbeddedServer(uvicorn.Server):
    """uvicorn without a say in the process: signals are the caller's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """uvicorn, inside the running loop."""

    def __init__(self, config: RouterConfig, frontend: Frontend, listener: socket.socket) -> None:
        self.address = _address(config.host, listener.getsockname()[1])
        bounds = config.bounds
        self._server = EmbeddedServer(
            uvicorn.Config(
                openai_app(frontend),
                http=BoundedConnection.with_limits(bounds.max_header_bytes, bounds.receive_seconds),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                timeout_keep_alive=75,
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
