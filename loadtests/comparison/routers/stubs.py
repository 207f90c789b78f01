"""Runs the OpenAI HTTP stub or a stub worker in a process of its own.

`python -m penstock.loadtests.comparison.routers.stubs KIND STEP_MS` prints the address of
the stub. It then sets the step time to each number of milliseconds that it reads from stdin, and
exits at the end of stdin.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvloop

from penstock.loadtests.comparison.routers.openai_stub import OpenAiStub
from penstock.loadtests.micro.child_server import child_server
from penstock.loadtests.micro.stub_workers import StubWorker

WORKER_NAME = "mixed-0"
_MODULE = "penstock.loadtests.comparison.routers.stubs"
_TOKEN_ID = 269  # id of " a" (`openai_stub.TOKEN`) in the tokenizer of the bundled model


@dataclass(frozen=True, slots=True)
class Stub:
    """A running stub process."""

    process: asyncio.subprocess.Process
    address: str  # host:port

    def set_step(self, step_ms: float) -> None:
        """Set the step time. No stream may be running."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{step_ms}\n".encode())


@asynccontextmanager
async def stub(kind: str, step_ms: float) -> AsyncIterator[Stub]:
    """Run a stub of kind "openai" or "worker" while the context is active.

    Raises MeasurementFailed.
    """
    async with child_server(_MODULE, kind, str(step_ms)) as (process, address):
        yield Stub(process, address)


async def _serve(kind: str, step_ms: float) -> None:
    server: OpenAiStub | StubWorker
    if kind == "openai":
        server = OpenAiStub(step_ms / 1000)
    else:
        server = StubWorker(WORKER_NAME, step_ms / 1000, token=lambda run: _TOKEN_ID)
    await server.start()
    print(server.address, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        server.step_seconds = float(line) / 1000
    await server.stop()


def main() -> int:
    """Serve until stdin is closed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sys.argv[1], float(sys.argv[2])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
