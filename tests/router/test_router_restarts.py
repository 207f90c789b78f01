"""A router is killed (SIGKILL) and started again; it knows the cached blocks of its workers again.

Relays between the routers and the workers record the messages. The test checks the number and the
order of the messages, because the time depends on the load of the machine. `micro.cache_resync`
measures the time.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.status import fetch
from penstock.loadtests.micro.server import free_ports
from penstock.loadtests.micro.standalone_router import StandaloneRouter, standalone_router
from penstock.protos import worker_pb2 as pb
from tests.support.checkpoints import make_checkpoint
from tests.support.worker_process import worker_process
from tests.support.worker_relay import RelayedStream, WorkerRelay, worker_relay

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1200)]

KEY = bytes(range(32)).hex()
NUM_PROMPTS = 8
PROMPT_LEN, BLOCK_SIZE = 100, 16
ANSWER_LEN, NUM_BLOCKS = 4, 6  # a prompt with its answer has 6 full blocks
TIMEOUT = 240.0  # long, because the machine may be busy
WORKER: dict[str, Any] = {"kv_cache_mib": 256, "hash_key": KEY, "role": "mixed"}


@dataclass
class Cluster:
    """Two workers and two routers; the routers reach the workers through relays."""

    model: Path
    relays: Mapping[str, WorkerRelay]
    ports: Mapping[str, int]  # of the router that is killed and started again

    def router(self, name: str, **ports: int) -> Any:
        addresses = {worker: relay.address for worker, relay in self.relays.items()}
        return standalone_router(
            self.model, addresses, name=name, hash_key=KEY, worker_timeout_seconds=120.0, **ports
        )

    def streams(self, router: str) -> Sequence[Sequence[RelayedStream]]:
        """Return the streams of a router to each worker, in the order of opening."""
        return [
            [stream for stream in relay.streams if stream.router == router]
            for relay in self.relays.values()
        ]


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    make_checkpoint(folder, "llama3")
    relays = {}
    async with AsyncExitStack() as stack:
        for name in ("mixed-0", "mixed-1"):
            # Ten missed heartbeats end a stream: with long intervals, a busy machine ends none.
            process = worker_process(name, folder, heartbeat_seconds=10.0, **WORKER)
            worker = await stack.enter_async_context(process)
            relays[name] = await stack.enter_async_context(worker_relay(worker.address))
        http, grpc, admin = free_ports(3)
        ports = {"http_port": http, "grpc_port": grpc, "admin_port": admin}
        yield Cluster(folder, relays, ports)


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(5, 295), k=PROMPT_LEN)


def client_of(router: StandaloneRouter) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{router.http}", timeout=TIMEOUT)


async def complete(http: httpx.AsyncClient, tokens: Sequence[int]) -> int:
    """Answer a prompt; return the number of its tokens that the worker had cached."""
    body = {"prompt": tokens, "max_tokens": ANSWER_LEN, "ignore_eos": True}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def indexed_blocks(router: StandaloneRouter) -> int:
    """Return the number of cached blocks of all workers that a router knows."""
    status = await asyncio.to_thread(fetch, router.admin, None)
    return sum(each["indexed_blocks"] for each in status["workers"])


async def until_indexed(router: StandaloneRouter, num_prompts: int) -> None:
    """Wait until a router knows exactly the blocks of this number of different prompts."""
    async with asyncio.timeout(TIMEOUT):
        while await indexed_blocks(router) != num_prompts * NUM_BLOCKS:
            await asyncio.sleep(0.02)


def first_messages(stream: RelayedStream) -> list[str | None]:
    """Return the types of the messages to a router up to the last chunk of the first snapshot.

    Heartbeats are left out, and so are Steps that carry only the worker's load.
    """
    kinds = []
    for message in stream.to_router:
        kind = message.WhichOneof("body")
        is_load = kind == "step" and message.step == pb.Step(load=message.step.load)
        if kind != "heartbeat" and not is_load:
            kinds.append(kind)
        if message.cache_snapshot.last:
            return kinds
    raise AssertionError("no snapshot arrived")


def num_snapshots(stream: RelayedStream) -> int:
    return sum(message.cache_snapshot.last for message in stream.to_router)


def num_resyncs(stream: RelayedStream) -> int:
    return sum(message.HasField("resync_cache") for message in stream.to_worker)


async def test_restarted_router_gets_one_snapshot_of_each_worker_directly_after_the_welcome(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as served, served.router("router-1") as other:
        async with served.router("router-0", **served.ports) as router:
            async with client_of(router) as http:
                for number in range(NUM_PROMPTS):
                    assert await complete(http, prompt(number)) == 0
            await until_indexed(router, NUM_PROMPTS)
            router.process.kill()
            await router.process.wait()

        num_prompts, is_restarted = NUM_PROMPTS, False

        async def keep_busy() -> None:
            nonlocal num_prompts
            async with client_of(other) as http:
                while not is_restarted:
                    await complete(http, prompt(num_prompts))
                    num_prompts += 1

        busy = asyncio.create_task(keep_busy())
        async with served.router("router-0", **served.ports) as restarted:
            assert restarted.http.endswith(f":{served.ports['http_port']}")
            async with asyncio.timeout(TIMEOUT):
                while not all(num_snapshots(each[-1]) for each in served.streams("router-0")):
                    await asyncio.sleep(0.002)
            is_restarted = True
            await busy
            await until_indexed(restarted, num_prompts)
            for before, stream in served.streams("router-0"):
                incarnations = {each.to_worker[0].hello.incarnation for each in (before, stream)}
                assert len(incarnations) == 2
                assert first_messages(stream) == ["welcome", "cache_snapshot"]
                assert (num_snapshots(stream), num_resyncs(stream)) == (1, 0)
            async with client_of(restarted) as http:
                for number in range(NUM_PROMPTS):
                    num_cached = await complete(http, prompt(number))
                    assert num_cached >= PROMPT_LEN // BLOCK_SIZE * BLOCK_SIZE
