"""Keeps one process of the cluster alive: starts it, and starts it anew whenever it dies."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from penstock.cluster.processes.actor_handle import StartFailed
from penstock.cluster.processes.backoff import RestartBackoff
from penstock.cluster.status.status_events import Died, Progress, Ready, Report


class ProcessHandle(Protocol):
    """One process, from its start to its death; `ActorHandle` is the real one."""

    async def start(self, config: object) -> Any: ...

    async def death(self) -> str: ...

    def kill(self) -> None: ...


class Managed(Protocol):
    """What is kept alive: a router or a worker, whose processes come and go."""

    @property
    def title(self) -> str: ...

    @property
    def config(self) -> object:
        """What its next process is started with."""
        ...

    async def reserve(self) -> None:
        """Take what its next process needs, or see that it is still there."""
        ...

    def make(self) -> ProcessHandle:
        """A new process, not started yet."""
        ...

    async def on_ready(self, address: Any) -> None:
        """Its process serves at `where`."""
        ...

    async def on_exit(self) -> None:
        """Its process is dead."""
        ...


async def keep_alive(
    managed: Managed,
    report: Report,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> StartFailed:
    """Goes on until a start fails that would fail again, which it returns, or is cancelled.

    `pause` waits the seconds before a next try.
    """
    record = RestartBackoff()
    clock = asyncio.get_running_loop().time
    while True:
        await managed.reserve()
        began = clock()
        report(managed.title, Progress("starting its process"))
        process = managed.make()
        try:
            where = await process.start(managed.config)
        except StartFailed as failure:
            process.kill()
            await managed.on_exit()
            reason, delay = failure.reason, record.after_failed_start()
            if failure.certain or delay is None:
                return failure
        else:
            report(managed.title, Ready(clock() - began))
            began = clock()
            await managed.on_ready(where)
            reason = await process.death()
            process.kill()  # a process may live on when what it hosts has failed
            await managed.on_exit()
            delay = record.after_death(clock() - began)
        report(managed.title, Died(reason, delay))
        await pause(delay)
