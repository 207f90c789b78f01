"""The gRPC option that routers and workers must set before they import gRPC."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest

import penstock
from penstock.loadtests.micro.standalone_router import standalone_router
from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the switches of threads from /proc"),
]

MODEL = Path(penstock.__file__).parent / "models" / "demo-small"
NUM_MESSAGES = 300
"""Number of messages of a test. If the threads of gRPC's pool read the sockets, they make at least
three context switches per message; otherwise, they make about 15 in total, plus 10 per second."""

SCRIPT = f"""
import asyncio, os, sys
from penstock.protos.serving.grpc_settings import configure_grpc
configure_grpc()
assert "grpc" not in sys.modules
import grpc.aio
from tests.protos.serving.test_grpc_settings import switches_of_pool

async def echo(messages, context):
    async for message in messages:
        await context.write(message)

async def serve():
    server = grpc.aio.server()
    handlers = {{"Echo": grpc.stream_stream_rpc_method_handler(echo)}}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        call = channel.stream_stream("/test/Echo")()
        for _ in range({NUM_MESSAGES}):
            await call.write(b"x")
            await call.read()
        await call.done_writing()
    print(switches_of_pool(os.getpid()))
    await server.stop(None)

asyncio.run(serve())
"""


def switches_of_pool(pid: int) -> int:
    """Return the number of voluntary context switches of the threads of gRPC's pool."""
    count = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            if (task / "comm").read_text().strip() == "event_engine":
                lines = (task / "status").read_text().splitlines()
                count += int(dict(line.split(":") for line in lines)["voluntary_ctxt_switches"])
    return count


def run(**environment: str) -> tuple[int, str]:
    """Run a gRPC server and client; return their pool's context switches, and their stderr."""
    kept = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout), done.stderr


def test_grpc_knows_the_experiments_and_its_pool_reads_no_socket() -> None:
    switches, errors = run()
    assert switches < NUM_MESSAGES
    assert "experiment" not in errors.lower()


def test_a_value_of_the_user_is_kept() -> None:
    switches, _ = run(GRPC_EXPERIMENTS="event_engine_client,event_engine_listener")
    assert switches > NUM_MESSAGES


async def test_the_pool_of_a_router_process_reads_no_socket() -> None:
    async with (
        standalone_router(MODEL, {}) as router,
        grpc.aio.insecure_channel(router.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        before = switches_of_pool(router.process.pid)
        for _ in range(NUM_MESSAGES):
            await stub.ListModels(pb.ListModelsRequest())
        assert switches_of_pool(router.process.pid) - before < NUM_MESSAGES


def test_modules_that_an_actor_needs_before_its_start_do_not_load_grpc() -> None:
    modules = (
        "penstock.cluster.processes.actors, penstock.router.config, penstock.workers.config, "
        "penstock.workers.rank.process_tuning"
    )
    script = f"import sys, {modules}; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.split()[-1] == b"False"
