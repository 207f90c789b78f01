"""Keeps a router or worker running: starts a new process whenever its process dies."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from penstock.cluster.processes.actor_handle import StartFailed
from penstock.cluster.processes.backoff import RestartBackoff
from penstock.cluster.status.status_events import Died, Progress, Ready, Report


class ProcessHandle(Protocol):
    """One process, from its start to its death. Implemented by `ActorHandle` and `RankGroup`."""

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
        """Reserve resources for the next process, or check that they are still reserved."""
        ...

    def make(self) -> ProcessHandle:
        """Create a new process, but do not start the router or worker in it yet."""
        ...

    async def on_ready(self, address: Any) -> None:
        """Handle the successful start of the process, which now serves at `address`."""
        ...

    async def on_exit(self) -> None:
        """Handle the death of the process."""
        ...


async def keep_alive(
    managed: Managed,
    report: Report,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> StartFailed:
    """Keep a router or worker running until it must be given up, and return the last failed start.

    The router or worker is given up if its process reports an error at the start. It is also given
    up after several failed starts in a row.

    Args:
        managed: the router or worker.
        report: called with the status events of the router or worker.
        pause: waits for a given number of seconds before the next start.
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
            process.kill()  # the process may still run although the worker in it has failed
            await managed.on_exit()
            delay = record.after_death(clock() - began)
        report(managed.title, Died(reason, delay))
        await pause(delay)
