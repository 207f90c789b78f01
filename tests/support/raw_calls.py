"""gRPC calls whose messages are raw bytes."""

from typing import Any

import grpc


async def write_and_read(call: grpc.aio.StreamStreamCall, data: bytes) -> Any:
    """Write bytes and read the reply.

    Raises AioRpcError if the call is refused. If the refusal arrives early, the write raises it.
    """
    await call.write(data)
    return await call.read()
