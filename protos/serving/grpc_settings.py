"""Sets an environment variable that makes gRPC faster in routers and workers.

gRPC reads the variable when it is imported, so this module does not import gRPC.
"""

import os

EXPERIMENTS = "-event_engine_client,-event_engine_listener"
"""Value of GRPC_EXPERIMENTS that switches two of gRPC's experiments off.

The two experiments are on by default. With them, gRPC reads sockets in a pool of threads, which
pass each message to the thread that waits for messages. Without them, the waiting thread reads the
sockets itself. This saves a tenth of a router's CPU time per token (docs/performance.md).

gRPC will remove both experiments. The version that pyproject.toml requires has them. A version
without them logs an error (tests/protos/serving/test_grpc_settings.py).
"""


def configure_grpc() -> None:
    """Set GRPC_EXPERIMENTS, unless the user has set it. Call this before gRPC is imported.

    Users set the variable with `penstock serve --pass-env GRPC_EXPERIMENTS`.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", EXPERIMENTS)
