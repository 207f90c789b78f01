"""The gRPC port of a worker: limits on its clients, and authorization before a message is read.

Routers call with the cluster's token, other workers with this worker's secret for KV transfers.
"""

import grpc.aio

from penstock.protos import transfer_pb2
from penstock.protos.serving.authorization import (
    AuthInterceptor,
    Authorize,
    CallMetadata,
    check_secret,
)
from penstock.protos.serving.connection_guard import ConnectionGuard
from penstock.protos.serving.port_limits import PortLimits, server_options
from penstock.protos.serving.refused_connections import RefusedConnections
from penstock.workers.config import WorkerConfig
from penstock.workers.service.codec import MAX_MESSAGE_BYTES

LIMITS = PortLimits(
    max_message_bytes=MAX_MESSAGE_BYTES,
    max_metadata_bytes=16 << 10,
    # Clients are routers, other workers and health checks; each needs one connection.
    max_connections=1024,
    max_connections_per_address=256,
    max_calls=64,  # a router has at most two open calls; a worker has one per connection attempt
    handshake_seconds=10.0,
    idle_seconds=60.0,
)
RECEIVE_SECONDS = 10.0  # time within which the request of a call must arrive
MAX_HEALTH_WATCHES = 16  # open `Watch` calls of gRPC health from one IP address

_TRANSFER_PATH = f"/{transfer_pb2.DESCRIPTOR.services_by_name['Transfer'].full_name}/"


def new_server(token: str | None, transfer_secret: str) -> grpc.aio.Server:
    """Return a server, not yet bound to a port, for the services of a worker.

    Args:
        token: the cluster's token; None: routers need none.
        transfer_secret: secret that other workers must send to open a channel for KV transfers.
    """
    return grpc.aio.server(
        interceptors=[AuthInterceptor(_authorizer(token, transfer_secret))],
        options=[
            *server_options(LIMITS),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ],
    )


def _authorizer(token: str | None, transfer_secret: str) -> Authorize:
    def authorize(method: str, metadata: CallMetadata) -> None:
        if method.startswith(_TRANSFER_PATH):
            check_secret(metadata, transfer_secret, "wrong or missing transfer secret")
        else:
            check_secret(metadata, token, "wrong or no cluster token: a router must send it")

    return authorize


def bind(server: grpc.aio.Server, config: WorkerConfig) -> str:
    """Bind the server; return its address, host:port. Raises OSError if it cannot be bound."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        port = server.add_insecure_port(f"{host}:{config.port}")
    except RuntimeError:
        raise OSError(
            f"worker {config.name} cannot listen on {host}:{config.port}: the port is taken, or "
            "the address is not one of this machine. Choose another port or address"
        ) from None
    return f"{host}:{port}"


def guard(address: str) -> ConnectionGuard:
    """Limit how many connections a client may have to `address`, until the guard is closed."""
    port = int(address.rpartition(":")[2])
    return ConnectionGuard(port, LIMITS.max_connections_per_address, RefusedConnections("worker"))
