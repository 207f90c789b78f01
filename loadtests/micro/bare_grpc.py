"""Sends the replies of a router from a gRPC server without Penstock's code."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import grpc.aio
import uvloop

from penstock.loadtests.micro.child_server import child_server
from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc


class _BareServer(inference_pb2_grpc.InferenceServicer):
    """A bare gRPC server that sends one token per tick to each stream."""

    def __init__(self, step_seconds: float) -> None:
        self._tick = asyncio.Event()
        self._step_seconds = step_seconds

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_seconds)
            self._tick.set()
            self._tick = asyncio.Event()

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        last = request.sampling.max_tokens - 1
        for position in range(last + 1):
            await self._tick.wait()
            reply = pb.GenerateReply(position=position, tokens=(300 + position,), text=" token")
            reply.request_id = "gen-17d0c2f1a5b3e000"
            reply.seed = 1
            if position == last:
                reply.finish_reason = "length"
                reply.usage.completion_tokens = last + 1
            await context.write(reply)


async def _serve(step_seconds: float) -> None:
    servicer, server = _BareServer(step_seconds), grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ticking = asyncio.create_task(servicer.run())
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    ticking.cancel()
    await server.stop(None)


def bare_server(
    step_ms: float,
) -> AbstractAsyncContextManager[tuple[asyncio.subprocess.Process, str]]:
    """Run the bare server in its own process. Yield the process and the server's address.

    Raises:
        MeasurementFailed: the server did not start.
    """
    return child_server("penstock.loadtests.micro.bare_grpc", str(step_ms))


def main(arguments: Sequence[str]) -> int:
    """Run the server until stdin is closed.

    The command-line argument is the time between tokens in ms.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(float(arguments[0]) / 1000))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
