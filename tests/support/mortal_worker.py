"""A worker that dies at a given position of its answer; another worker then continues it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from penstock.protos import worker_pb2 as pb
from penstock.protos.worker_codec import unpack_tokens
from penstock.router.config import RouterConfig
from tests.support.served_router import Served, serving, until
from tests.support.stub_worker import Run, StubWorker

T = TypeVar("T")


class MortalWorker(StubWorker):
    """A worker that stops before the step that generates token number `last_position`."""

    def __init__(self, name: str, tokens: Sequence[int]) -> None:
        super().__init__(name, answer=lambda prompt: tokens)
        self.last_position = -1
        self.is_at_end = asyncio.Event()

    def _make_step(self, runs: Sequence[Run]) -> None:
        if any(run.position == self.last_position for run in runs):
            self.stepping.clear()
            self.is_at_end.set()
            self.send(pb.ToRouter(heartbeat=pb.Heartbeat()))
            return
        super()._make_step(runs)


async def interrupted(
    config: RouterConfig,
    tokens: Sequence[int],
    position: int,
    call: Callable[[Served], Awaitable[T]],
) -> T:
    """Return the result of a call whose worker dies after `position` tokens.

    Args:
        config: configuration of the router.
        tokens: the answer's tokens.
        position: number of tokens before the death.
        call: sends one request and reads its answer.
    """
    workers = MortalWorker("w0", tokens), MortalWorker("w1", tokens)
    for worker in workers:
        worker.last_position = position
    async with serving(config, *workers) as served:
        answer = asyncio.ensure_future(call(served))
        waits = [asyncio.create_task(worker.is_at_end.wait()) for worker in workers]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        busy, spare = workers if workers[0].is_at_end.is_set() else workers[::-1]
        spare.last_position = -1
        generated = served.router.frontend.metrics.generated_by_tenant
        await until(lambda: sum(generated().values()) == position, "a token was lost")
        await busy.stop()
        served.router.worker_died(busy.name)
        found = await answer
        (resumed,) = spare.submits
        assert unpack_tokens(resumed.log[0].tokens) == list(tokens[:position])
        return found
