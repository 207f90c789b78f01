"""The standard gRPC health service, with a limit on the open `Watch` calls of each client."""

from collections import Counter

import grpc
from grpc_health.v1 import health, health_pb2

from penstock.protos.serving.call_error import CallError, retry_metadata
from penstock.protos.serving.call_handlers import CallHandlers, Context

_RETRY_SECONDS = 10.0


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]
    """The health service, which every client may call without authorization.

    The number of open `Watch` calls of each client address is therefore limited.

    Args:
        max_watches: largest number of open `Watch` calls of one client address.
    """

    def __init__(self, max_watches: int) -> None:
        super().__init__()
        self._max_watches = max_watches
        self._watches: Counter[str] = Counter()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Send the status of a service at each change, until the client cancels the call."""
        address = context.peer().rpartition(":")[0]  # the address of the client, without the port
        if self._watches[address] >= self._max_watches:
            raise CallError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"this address has {self._max_watches} open Watch calls, the maximum: cancel one",
                retry_metadata(_RETRY_SECONDS),
            )
        self._watches[address] += 1
        try:
            await super().Watch(request, context)
        finally:
            self._watches[address] -= 1
            if not self._watches[address]:
                del self._watches[address]


def health_handlers(service: HealthService, calls: CallHandlers) -> grpc.GenericRpcHandler:
    """Return the handlers of the health service."""
    kind = health_pb2.HealthCheckRequest
    methods = {
        "Check": calls.unary(kind, service.Check),
        "Watch": calls.streaming(kind, service.Watch),
    }
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)
