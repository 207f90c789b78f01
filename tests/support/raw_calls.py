"""gRPC calls whose messages are raw bytes."""

from typing import Any

import grpc


async def write_and_read(call: grpc.aio.StreamStreamCall, data: bytes) -> Any:
    """Write bytes and read the reply.

    Raises AioRpcError if the call is refused: by the write if the refusal is the first to arrive.
    """
    await call.write(data)
    return await call.read()
