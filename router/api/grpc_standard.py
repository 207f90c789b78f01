"""The standard gRPC services, health and reflection, with limits on what their clients may hold."""

from collections import Counter
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from penstock.router.api.grpc_calls import CallHandlers, Context
from penstock.router.errors import Code, ServingError


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]
    """The health service; it needs no API key, so open `Watch` calls are bounded per address.

    Args:
        max_watches: open `Watch` calls per client address.
    """

    def __init__(self, max_watches: int) -> None:
        super().__init__()
        self._max_watches = max_watches
        self._watches: Counter[str] = Counter()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Send the status of a service at each change, until the client cancels."""
        address = context.peer().rpartition(":")[0]  # without the port
        if self._watches[address] >= self._max_watches:
            raise ServingError(
                Code.OVERLOADED, f"{self._max_watches} Watch calls are open: cancel one", None, 10.0
            )
        self._watches[address] += 1
        try:
            await super().Watch(request, context)
        finally:
            self._watches[address] -= 1
            if not self._watches[address]:
                del self._watches[address]


def health_handlers(service: HealthService, calls: CallHandlers) -> grpc.GenericRpcHandler:
    kind = health_pb2.HealthCheckRequest
    methods = {
        "Check": calls.unary(kind, service.Check),
        "Watch": calls.streaming(kind, service.Watch),
    }
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)


def reflection_handlers(services: Sequence[str], calls: CallHandlers) -> grpc.GenericRpcHandler:
    """Return the handlers of reflection for the services with the given names."""
    servicer = reflection.aio.ReflectionServicer([*services, reflection.SERVICE_NAME])
    kind = reflection_pb2.ServerReflectionRequest
    methods = {"ServerReflectionInfo": calls.bidirectional(kind, servicer.ServerReflectionInfo)}
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, methods)
