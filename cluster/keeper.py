"""Keeps one process of the cluster alive: starts it, and starts it anew whenever it dies."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from penstock.cluster.member import StartFailed
from penstock.cluster.notices import Died, Progress, Ready, Report
from penstock.cluster.restarts import Restarts


class Life(Protocol):
    """One process, from its start to its death; `Member` is the real one."""

    async def start(self, config: object) -> Any: ...

    async def death(self) -> str: ...

    def kill(self) -> None: ...


class Hosted(Protocol):
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

    def make(self) -> Life:
        """A new process, not started yet."""
        ...

    async def came(self, where: Any) -> None:
        """Its process serves at `where`."""
        ...

    async def went(self) -> None:
        """Its process is dead."""
        ...


async def keep(
    hosted: Hosted,
    report: Report,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> StartFailed:
    """Goes on until a start fails that would fail again, which it returns, or is cancelled.

    `pause` waits the seconds before a next try.
    """
    record = Restarts()
    clock = asyncio.get_running_loop().time
    while True:
        await hosted.reserve()
        began = clock()
        report(hosted.title, Progress("starting its process"))
        life = hosted.make()
        try:
            where = await life.start(hosted.config)
        except StartFailed as failure:
            life.kill()
            await hosted.went()
            reason, delay = failure.reason, record.after_failed_start()
            if failure.certain or delay is None:
                return failure
        else:
            report(hosted.title, Ready(clock() - began))
            began = clock()
            await hosted.came(where)
            reason = await life.death()
            life.kill()  # a process may live on when what it hosts has failed
            await hosted.went()
            delay = record.after_death(clock() - began)
        report(hosted.title, Died(reason, delay))
        await pause(delay)
