"""Checks the authorization of gRPC calls before any of their messages is read."""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health

from penstock.protos.serving.call_error import CallError, abort

CallMetadata: TypeAlias = Sequence[tuple[str, str | bytes]] | None

Authorize: TypeAlias = Callable[[str, CallMetadata], None]
"""Function that checks a call by its method and its metadata. Raises CallError to refuse it."""

HEALTH_PATH = f"/{health.SERVICE_NAME}/"
"""Prefix of the methods of the health service, which every client may call without a secret."""


def authorization_of(metadata: CallMetadata) -> str | None:
    """Return the value of a call's `authorization` header, or None if the call has none."""
    for name, value in metadata or ():
        if name == "authorization" and isinstance(value, str):
            return value
    return None


def check_secret(metadata: CallMetadata, secret: str | None, refusal: str) -> None:
    """Refuse a call if its `authorization` header does not contain the right secret.

    Args:
        metadata: the metadata of the call.
        secret: the secret. If it is None, every call is allowed.
        refusal: text of the error for a refused call.

    Raises:
        CallError: the secret is wrong or missing. The status is UNAUTHENTICATED.
    """
    shown = authorization_of(metadata) or ""
    if secret is not None and not hmac.compare_digest(
        shown.encode(errors="surrogateescape"), f"Bearer {secret}".encode()
    ):
        raise CallError(grpc.StatusCode.UNAUTHENTICATED, refusal)


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends the calls that `authorize` refuses. Health checks are always allowed.

    A refused call gets a handler that reads no messages.
    """

    def __init__(self, authorize: Authorize) -> None:
        self._authorize = authorize

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if not method.startswith(HEALTH_PATH):
            try:
                self._authorize(method, handler_call_details.invocation_metadata)
            except CallError as error:
                return _denial(error)
        return await continuation(handler_call_details)


class ThreadedAuthInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Variant of `AuthInterceptor` for a server that runs calls in threads.

    Such a server has no health service, so every call is checked.
    """

    def __init__(self, authorize: Authorize) -> None:
        self._authorize = authorize

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        details = handler_call_details
        try:
            self._authorize(details.method, details.invocation_metadata)
        except CallError as error:
            return _threaded_denial(error)
        return continuation(details)


def _denial(error: CallError) -> grpc.RpcMethodHandler:
    async def deny(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(deny)


def _threaded_denial(error: CallError) -> grpc.RpcMethodHandler:
    def deny(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        context.abort(error.code, error.details)

    return grpc.stream_stream_rpc_method_handler(deny)
