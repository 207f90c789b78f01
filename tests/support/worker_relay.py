"""A relay between routers and a worker that records the messages of their streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from penstock.protos import worker_pb2 as pb
from penstock.protos import worker_pb2_grpc


@dataclass
class RelayedStream:
    """The messages of one stream, in order. The first one of the router is its Hello."""

    to_worker: list[pb.ToWorker] = field(default_factory=list)
    to_router: list[pb.ToRouter] = field(default_factory=list)

    @property
    def router(self) -> str:
        """Name of the router, or "" before its Hello has arrived."""
        return self.to_worker[0].hello.router if self.to_worker else ""


class WorkerRelay(worker_pb2_grpc.WorkerServicer):
    """Forwards each stream of a router to the worker at `worker_address` (host:port)."""

    def __init__(self, worker_address: str) -> None:
        self.address = ""  # address for routers, as host:port
        self.streams: list[RelayedStream] = []  # in the order in which they were opened
        self._worker_address = worker_address

    async def Attach(
        self, requests: AsyncIterator[pb.ToWorker], context: grpc.aio.ServicerContext
    ) -> None:
        self.streams.append(stream := RelayedStream())
        async with grpc.aio.insecure_channel(self._worker_address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Attach(metadata=context.invocation_metadata())

            async def forward() -> None:
                async for message in requests:
                    stream.to_worker.append(message)
                    await call.write(message)
                await call.done_writing()

            forwarding = asyncio.create_task(forward())
            try:
                async for message in call:
                    stream.to_router.append(message)
                    await context.write(message)
            finally:
                forwarding.cancel()
                call.cancel()
                await asyncio.wait((forwarding,))


@asynccontextmanager
async def worker_relay(worker_address: str) -> AsyncIterator[WorkerRelay]:
    """Run a relay to a worker on a free port."""
    relay, server = WorkerRelay(worker_address), grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(relay, server)  # type: ignore[no-untyped-call]
    relay.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield relay
    finally:
        await server.stop(grace=None)
