"""The standard gRPC health service of a worker."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

Method = Callable[[health_pb2.HealthCheckRequest, grpc.aio.ServicerContext], Awaitable[Any]]


def health_handlers(service: health.aio.HealthServicer) -> grpc.GenericRpcHandler:
    """Return the handlers of the health service.

    The methods need no token: every client that reaches the port may call them. Requests are
    parsed here, because gRPC logs a traceback for each message that it cannot parse itself.
    """
    methods = {
        "Check": grpc.unary_unary_rpc_method_handler(_parsed(service.Check), None, _serialize),
        "Watch": grpc.unary_stream_rpc_method_handler(_parsed(service.Watch), None, _serialize),
    }
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)


def _parsed(method: Method) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[Any]]:
    """Return a method that parses a serialized request and calls `method`."""

    async def call(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        try:
            request = health_pb2.HealthCheckRequest.FromString(data)
        except DecodeError:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the message is not a valid {health_pb2.HealthCheckRequest.DESCRIPTOR.full_name}",
            )
        return await method(request, context)

    return call


def _serialize(reply: health_pb2.HealthCheckResponse) -> bytes:
    data: bytes = reply.SerializeToString()
    return data
