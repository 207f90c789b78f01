"""The standard gRPC reflection service."""

from collections.abc import Sequence

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from penstock.protos.serving.call_handlers import CallHandlers


def reflection_handlers(services: Sequence[str], calls: CallHandlers) -> grpc.GenericRpcHandler:
    """Return the handlers of the reflection service, which describes the services `names`."""
    servicer = reflection.aio.ReflectionServicer([*services, reflection.SERVICE_NAME])
    kind = reflection_pb2.ServerReflectionRequest
    methods = {"ServerReflectionInfo": calls.bidirectional(kind, servicer.ServerReflectionInfo)}
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, methods)
