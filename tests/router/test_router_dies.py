"""Real processes: two routers over one worker, one of them killed with -9 or drained under load."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from penstock.cli.checkpoint import SHIPPED
from penstock.cli.status import fetch
from penstock.loadtests.bench.resuming_client import ResumingClient
from penstock.loadtests.micro.standalone_router import StandaloneRouter, standalone_router
from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc
from penstock.router.config import RouterConfig
from penstock.router.server import RunningRouter, serve_router
from tests.support.worker_process import WorkerProcess, worker_process

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = SHIPPED.parent / "demo-small"
TOKEN = "of-this-test"
LONG = 600
BOUND = 120.0
WORKER: dict[str, Any] = {
    "token": TOKEN,
    "kv_cache_mib": 64,
    "deterministic": True,
    "role": "mixed",
}
PATIENT: dict[str, Any] = {
    "worker_token": TOKEN,
    "worker_timeout_seconds": 120.0,
}  # on a busy machine
# A client that does not read lets the router send it about a kilobyte: its stream does not end.
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]

WHOLE = [
    pb.GenerateRequest(
        text="Tell me a story about a fox.",
        sampling=pb.Sampling(temperature=0, max_tokens=LONG, ignore_eos=True, logprobs=1),
    ),
    pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="Who are you?")]),
        sampling=pb.Sampling(
            temperature=1.5,
            seed=2**64 - 3,
            max_tokens=LONG,
            ignore_eos=True,
            n=2,
            presence_penalty=0.4,
            repetition_penalty=1.1,
        ),
    ),
    pb.GenerateRequest(
        text="Count: one, two, three,",
        sampling=pb.Sampling(temperature=0.9, seed=5, max_tokens=LONG, ignore_eos=True),
        stop=["\u0001 never said"],
    ),
]


def stub_of(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


class Read:
    """What a client has read."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.usage: tuple[int, int] | None = None
        self.num_logprobs = 0

    def take(self, reply: pb.GenerateReply) -> None:
        answer = self.tokens.setdefault(reply.choice, [])
        assert not reply.tokens or reply.position == len(answer)
        answer.extend(reply.tokens)
        self.text[reply.choice] = self.text.get(reply.choice, "") + reply.text
        self.num_logprobs += len(reply.logprobs)
        if reply.HasField("usage"):
            assert self.usage is None, "told twice"
            self.usage = (reply.usage.prompt_tokens, reply.usage.completion_tokens)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))


async def read(
    client: ResumingClient,
    request: pb.GenerateRequest,
    into: Read,
    resume: asyncio.Event | None = None,
) -> Read:
    """Read the whole answer; with an event, wait for it after the first six tokens."""
    async for reply in client.generate(request):
        into.take(reply)
        if resume is not None and into.num_tokens > 5:
            await resume.wait()
    return into


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[WorkerProcess, list[StandaloneRouter], list[Any]]]:
    """A worker, two routers over it, and a stub of each."""
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(worker_process("mixed-0", MODEL, **WORKER))
        routers, stubs = [], []
        for name in ("router-0", "router-1"):
            router = await stack.enter_async_context(
                standalone_router(MODEL, {"mixed-0": worker.address}, name=name, **PATIENT)
            )
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(router.grpc, options=SMALL_WINDOW)
            )
            routers.append(router)
            stubs.append(stub_of(channel))
            await until(lambda: status_of(router), lambda told: not told["not_ready"])  # noqa: B023
        yield worker, routers, stubs


async def status_of(router: StandaloneRouter) -> Any:
    return await asyncio.to_thread(fetch, router.http, None)


async def until(look: Any, holds: Any) -> Any:
    """What was seen once it holds."""
    async with asyncio.timeout(BOUND):
        while not holds(seen := await look()):
            await asyncio.sleep(0.02)
    return seen


async def fewest(reads: Sequence[Read]) -> int:
    return min(each.num_tokens for each in reads)


async def test_its_clients_go_on_through_the_other_whose_own_notice_nothing() -> None:
    async with cluster() as (worker, (first, second), stubs):
        right = [await read(ResumingClient(stubs[1:]), each, Read()) for each in WHOLE]
        alone = await until(lambda: status_of(second), is_empty)

        reads = [Read() for _ in WHOLE]
        bystanders = [Read() for _ in WHOLE]
        clients = [ResumingClient(stubs) for _ in WHOLE]
        crowd = [stubs[0].Generate(WHOLE[0]) for _ in range(6)]  # they never come back
        for call in crowd:
            await call.read()
        killed = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for client, request, into in zip(clients, WHOLE, reads, strict=True):
                tasks.create_task(read(client, request, into, killed))
            for request, into in zip(WHOLE, bystanders, strict=True):
                calls = ResumingClient(stubs[1:], timeout=0.0)
                tasks.create_task(read(calls, request, into))
            await until(lambda: fewest(reads), lambda number: number > 5)
            busy = await status_of(second)
            first.process.kill()
            await first.process.wait()
            killed.set()

        for into, other, whole in zip(reads, bystanders, right, strict=True):
            for seen in (into, other):
                assert seen.tokens == whole.tokens
                assert seen.text == whole.text
                assert seen.usage == whole.usage
                assert seen.num_logprobs == whole.num_logprobs
        assert [client.num_broken for client in clients] == [1, 1, 1]
        assert busy["workers"][0]["numbers"]["running"] > len(WHOLE) + 1, "nobody was there"
        # What the dead one held has gone, the crowd's unread answers too.
        left = await until(lambda: status_of(second), is_empty)
        assert left["failovers"] == alone["failovers"] == 0

        again = standalone_router(MODEL, {"mixed-0": worker.address}, name="router-0", **PATIENT)
        async with again as router, grpc.aio.insecure_channel(router.grpc) as channel:
            await until(lambda: status_of(router), lambda told: not told["not_ready"])
            seen = await read(ResumingClient([stub_of(channel)]), WHOLE[0], Read())
            assert seen.tokens == right[0].tokens


async def test_one_that_drains_ends_its_streams_and_what_is_new_goes_to_the_other() -> None:
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(worker_process("mixed-0", MODEL, **WORKER))
        routers, stubs = [], []
        for name in ("router-0", "router-1"):
            config = RouterConfig(
                MODEL, "m", name=name, http_port=0, grpc_port=0, worker_timeout_seconds=120.0,
                worker_token=TOKEN,
            )  # fmt: skip
            routers.append(router := await serve_router(config))
            stack.push_async_callback(router.stop)
            await router.set_workers({"mixed-0": worker.address})
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(router.grpc_address)
            )
            stubs.append(stub_of(channel))
            await until(why_not_ready(router), lambda why: not why)
        right = await read(ResumingClient(stubs[1:]), WHOLE[2], Read())

        running, into = [ResumingClient(stubs[:1], timeout=0.0) for _ in range(3)], Read()
        streams = [asyncio.create_task(read(running[0], WHOLE[2], into))]
        streams += [asyncio.create_task(read(each, WHOLE[2], Read())) for each in running[1:]]
        await until(lambda: fewest([into]), lambda number: number > 2)
        draining = asyncio.create_task(routers[0].drain(BOUND))
        await until(why_not_ready(routers[0]), lambda why: why == "the router is draining")
        moved = ResumingClient(stubs)
        seen = await read(moved, WHOLE[2], Read())
        assert (seen.tokens, moved.num_broken) == (right.tokens, 1)
        await draining
        for stream, client in zip(streams, running, strict=True):
            assert ((await stream).tokens, client.num_broken) == (right.tokens, 0)
        assert routers[0].frontend.num_open_requests == 0
        told = await asyncio.to_thread(fetch, routers[1].http_address, None)
        assert told["finished"]["length"] == 2


def why_not_ready(router: RunningRouter) -> Any:
    async def look() -> str | None:
        return router.frontend.why_not_ready()

    return look


def is_empty(status: Any) -> bool:
    numbers = status["workers"][0]["numbers"]
    return bool(
        status["streams"] == 0
        and numbers["running"] == numbers["waiting"] == 0
        and numbers["blocks"]["used"] == numbers["blocks"]["leased"] == 0
    )
