"""The restart loop of one router or worker: starts a new process whenever the process dies."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from penstock.cluster.processes.actor_handle import StartFailed
from penstock.cluster.processes.backoff import RestartBackoff
from penstock.cluster.status.status_events import Died, Progress, Ready, Report


class ProcessHandle(Protocol):
    """One process, from start to death; implemented by `ActorHandle` and `RankGroup`."""

    async def start(self, config: object) -> Any: ...

    async def death(self) -> str: ...

    def kill(self) -> None: ...


class Managed(Protocol):
    """A router or worker that `keep_alive` restarts."""

    @property
    def title(self) -> str: ...

    @property
    def config(self) -> object:
        """Configuration for the next process."""
        ...

    async def reserve(self) -> None:
        """Reserve resources for the next process, or check that the reservation still holds."""
        ...

    def make(self) -> ProcessHandle:
        """Create a new process, without starting it."""
        ...

    async def on_ready(self, address: Any) -> None:
        """Callback: the process serves at `address`."""
        ...

    async def on_exit(self) -> None:
        """Callback: the process is dead."""
        ...


async def keep_alive(
    managed: Managed,
    report: Report,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> StartFailed:
    """Keep a router or worker running until it must be given up; return its last start failure.

    The router or worker is given up if the process itself reports an error while it starts, or
    after several failed starts in a row.

    Args:
        managed: the router or worker.
        report: called with status events of the router or worker.
        pause: waits the given number of seconds before the next try.
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
            process.kill()  # the process may still run although the hosted worker has failed
            await managed.on_exit()
            delay = record.after_death(clock() - began)
        report(managed.title, Died(reason, delay))
        await pause(delay)
