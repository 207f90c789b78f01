"""Sets an option of gRPC in routers and workers, without importing gRPC."""

import os

EXPERIMENTS = "-event_engine_client,-event_engine_listener"
"""By default, gRPC reads sockets in a pool of threads. These threads hand each message to another
thread that waits for messages. With the experiments off, the waiting thread reads the sockets
itself. This saves a tenth of a router's CPU time per token (docs/performance.md).

gRPC will remove both experiments. The version that pyproject.toml requires has them; a version
without them logs an error (tests/protos/serving/test_grpc_settings.py)."""


def configure_grpc() -> None:
    """Set gRPC's option; call this before gRPC is imported.

    A value that the user has set is kept (`penstock serve --pass-env GRPC_EXPERIMENTS`).
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", EXPERIMENTS)
