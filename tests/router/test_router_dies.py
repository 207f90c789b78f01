"""Two routers over one worker process; one router is killed (SIGKILL) or drained under load."""

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
MAX_TOKENS = 600
BOUND = 120.0
WORKER: dict[str, Any] = {
    "token": TOKEN,
    "kv_cache_mib": 64,
    "deterministic": True,
    "role": "mixed",
}
ROUTER_OPTIONS: dict[str, Any] = {
    "worker_token": TOKEN,
    "worker_timeout_seconds": 120.0,
}  # The timeouts are long, because the machine may be busy.
# With this window, a router can send only about 1 KB to a client that does not read.
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]

REQUESTS = [
    pb.GenerateRequest(
        text="Tell me a story about a fox.",
        sampling=pb.Sampling(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1),
    ),
    pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="Who are you?")]),
        sampling=pb.Sampling(
            temperature=1.5,
            seed=2**64 - 3,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            n=2,
            presence_penalty=0.4,
            repetition_penalty=1.1,
        ),
    ),
    pb.GenerateRequest(
        text="Count: one, two, three,",
        sampling=pb.Sampling(temperature=0.9, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True),
        stop=["\u0001 never said"],
    ),
]


def stub_of(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


class Received:
    """Tokens, text and usage that one client has received."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.usage: tuple[int, int] | None = None
        self.num_logprobs = 0

    def add(self, reply: pb.GenerateReply) -> None:
        answer = self.tokens.setdefault(reply.choice, [])
        assert not reply.tokens or reply.position == len(answer)
        answer.extend(reply.tokens)
        self.text[reply.choice] = self.text.get(reply.choice, "") + reply.text
        self.num_logprobs += len(reply.logprobs)
        if reply.HasField("usage"):
            assert self.usage is None, "usage was received twice"
            self.usage = (reply.usage.prompt_tokens, reply.usage.completion_tokens)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))


async def read(
    client: ResumingClient,
    request: pb.GenerateRequest,
    into: Received,
    resume: asyncio.Event | None = None,
) -> Received:
    """Collect the whole answer. If `resume` is given, pause after six tokens until it is set."""
    async for reply in client.generate(request):
        into.add(reply)
        if resume is not None and into.num_tokens > 5:
            await resume.wait()
    return into


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[WorkerProcess, list[StandaloneRouter], list[Any]]]:
    """Start a worker and two routers over it, with one gRPC stub per router."""
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(worker_process("mixed-0", MODEL, **WORKER))
        routers, stubs = [], []
        for name in ("router-0", "router-1"):
            router = await stack.enter_async_context(
                standalone_router(MODEL, {"mixed-0": worker.address}, name=name, **ROUTER_OPTIONS)
            )
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(router.grpc, options=SMALL_WINDOW)
            )
            routers.append(router)
            stubs.append(stub_of(channel))
            await until(lambda: status_of(router), lambda status: not status["not_ready"])  # noqa: B023
        yield worker, routers, stubs


async def status_of(router: StandaloneRouter) -> Any:
    return await asyncio.to_thread(fetch, router.admin, None)


async def until(poll: Any, accepts: Any) -> Any:
    """Call `poll` until `accepts` returns true for its result; return that result."""
    async with asyncio.timeout(BOUND):
        while not accepts(actual := await poll()):
            await asyncio.sleep(0.02)
    return actual


async def fewest_tokens(reads: Sequence[Received]) -> int:
    return min(each.num_tokens for each in reads)


async def test_clients_resume_at_the_other_router_and_its_own_streams_are_unaffected() -> None:
    async with cluster() as (worker, (first, second), stubs):
        expected = [await read(ResumingClient(stubs[1:]), each, Received()) for each in REQUESTS]
        baseline = await until(lambda: status_of(second), is_empty)

        reads = [Received() for _ in REQUESTS]
        other_reads = [Received() for _ in REQUESTS]
        clients = [ResumingClient(stubs) for _ in REQUESTS]
        # The clients of these six calls read only the first reply.
        abandoned_calls = [stubs[0].Generate(REQUESTS[0]) for _ in range(6)]
        for call in abandoned_calls:
            await call.read()
        killed = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for client, request, into in zip(clients, REQUESTS, reads, strict=True):
                tasks.create_task(read(client, request, into, killed))
            for request, into in zip(REQUESTS, other_reads, strict=True):
                calls = ResumingClient(stubs[1:], timeout=0.0)
                tasks.create_task(read(calls, request, into))
            await until(lambda: fewest_tokens(reads), lambda number: number > 5)
            status_at_kill = await status_of(second)
            first.process.kill()
            await first.process.wait()
            killed.set()

        for into, other, whole in zip(reads, other_reads, expected, strict=True):
            for actual in (into, other):
                assert actual.tokens == whole.tokens
                assert actual.text == whole.text
                assert actual.usage == whole.usage
                assert actual.num_logprobs == whole.num_logprobs
        assert [client.num_broken for client in clients] == [1, 1, 1]
        assert status_at_kill["workers"][0]["numbers"]["running"] > len(REQUESTS) + 1, (
            "too few requests were running at the kill"
        )
        # The worker frees all blocks of the killed router, including those of the abandoned calls.
        status_after = await until(lambda: status_of(second), is_empty)
        assert status_after["failovers"] == baseline["failovers"] == 0

        restarted = standalone_router(
            MODEL, {"mixed-0": worker.address}, name="router-0", **ROUTER_OPTIONS
        )
        async with restarted as router, grpc.aio.insecure_channel(router.grpc) as channel:
            await until(lambda: status_of(router), lambda status: not status["not_ready"])
            actual = await read(ResumingClient([stub_of(channel)]), REQUESTS[0], Received())
            assert actual.tokens == expected[0].tokens


async def test_draining_router_finishes_its_streams_and_refuses_new_requests() -> None:
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
        expected = await read(ResumingClient(stubs[1:]), REQUESTS[2], Received())

        running, into = [ResumingClient(stubs[:1], timeout=0.0) for _ in range(3)], Received()
        streams = [asyncio.create_task(read(running[0], REQUESTS[2], into))]
        streams += [
            asyncio.create_task(read(each, REQUESTS[2], Received())) for each in running[1:]
        ]
        await until(lambda: fewest_tokens([into]), lambda number: number > 2)
        draining = asyncio.create_task(routers[0].drain(BOUND))
        await until(why_not_ready(routers[0]), lambda why: why == "the router is draining")
        moved = ResumingClient(stubs)
        actual = await read(moved, REQUESTS[2], Received())
        assert (actual.tokens, moved.num_broken) == (expected.tokens, 1)
        await draining
        for stream, client in zip(streams, running, strict=True):
            assert ((await stream).tokens, client.num_broken) == (expected.tokens, 0)
        assert routers[0].frontend.num_open_requests == 0
        status = await asyncio.to_thread(fetch, routers[1].admin_address, None)
        assert status["finished"]["length"] == 2


def why_not_ready(router: RunningRouter) -> Any:
    async def poll() -> str | None:
        return router.frontend.why_not_ready()

    return poll


def is_empty(status: Any) -> bool:
    numbers = status["workers"][0]["numbers"]
    return bool(
        status["streams"] == 0
        and numbers["running"] == numbers["waiting"] == 0
        and numbers["blocks"]["used"] == numbers["blocks"]["leased"] == 0
    )
