"""Lets the supervisor start, call, monitor and kill one process that runs on Ray."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from penstock.cluster.processes import process_id
from penstock.cluster.processes.process_id import ProcessId
from penstock.cluster.ray_session import first_line
from penstock.cluster.status.status_events import ProcessEvent, Progress

SECONDS_TO_STOP = 10.0
RETRY_SECONDS = 0.5
PING_TIMEOUT_SECONDS = 30.0
DRAIN_REPLY_SECONDS = 5.0  # seconds to wait for the reply after the time limit of a drain


class StartFailed(RuntimeError):
    """A process did not become ready.

    Args:
        title: name of the process.
        reason: the cause, in one line.
        certain: True if the process itself reported the error, so that another start would fail
            too.
    """

    def __init__(self, title: str, reason: str, certain: bool) -> None:
        super().__init__(f"{title} did not start: {reason}")
        self.reason = reason
        self.certain = certain


class ActorHandle:
    """Handle of one process that Ray runs as an actor.

    Args:
        title: name of the process in reports.
        actor: Ray's handle of the actor, which other code must not use.
        on_event: called with the title and each event of the process.
        ping_timeout: seconds without a reply after which a started process counts as dead.
    """

    def __init__(
        self,
        title: str,
        actor: Any,
        on_event: Callable[[str, ProcessEvent], None],
        ping_timeout: float = PING_TIMEOUT_SECONDS,
    ) -> None:
        self.title = title
        self.up = False
        self._actor = actor
        self._on_event = on_event
        self._ping_timeout = ping_timeout
        self._process: ProcessId | None = None  # None until the process has started
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._events_task = asyncio.create_task(self._poll_events())
        self._ping_task: asyncio.Task[None] | None = None

    async def start(self, config: object) -> Any:
        """Start the hosted router or worker and return its address.

        Raises:
            StartFailed: the router or worker did not become ready.
        """
        where = await self.call_start("start", config)
        self.up = True
        self.start_pinging()
        return where

    def start_pinging(self) -> None:
        """Begin to ping the process, in order to detect that it hangs.

        Call this only after the model is loaded, because loading delays replies.
        """
        if self._ping_task is None:
            self._ping_task = asyncio.create_task(self._ping_forever())

    @property
    def process(self) -> ProcessId | None:
        """Id of the process, or None until the process has started."""
        return self._process

    def kill_by_ray(self) -> None:
        """Kill the process through Ray. A task that waits in `death` then gets the reason."""
        ray.kill(self._actor)

    async def call_start(self, method: str, *arguments: object) -> Any:
        """Call an actor method while the process starts. Raise `StartFailed` if the call fails."""
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayError as error:
            certain = isinstance(error, RayTaskError)
            raise StartFailed(self.title, _reason(error), certain) from None

    async def death(self) -> str:
        """Wait until the process has died or is declared dead. Return the reason, in one line."""
        return await asyncio.shield(self._death)

    def declare_dead(self, reason: str) -> None:
        """Let `death` return `reason`, although the process may still run."""
        if not self._death.done():
            self._death.set_result(reason)

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the actor. Return None if the process is dead or Ray cannot reach it.

        Raises:
            RayTaskError: the method raised an exception.
        """
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayTaskError:
            raise
        # `RayActorError` is not enough: if Ray's memory monitor has killed the process, Ray raises
        # `OutOfMemoryError`.
        except RayError:
            return None

    async def drain(self, seconds: float) -> None:
        """Drain the hosted router or worker.

        Wait at most `seconds` + `DRAIN_REPLY_SECONDS` until the drain has ended.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds + DRAIN_REPLY_SECONDS):
                await self.call("drain", seconds)

    async def stop(self) -> None:
        """Send a stop request to the process, wait up to `SECONDS_TO_STOP`, then kill it."""
        if self.up:
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(self.call("stop"), SECONDS_TO_STOP)
        self.kill()

    def kill(self) -> None:
        """Kill the process, even if it no longer responds."""
        self._events_task.cancel()
        if self._ping_task is not None:
            self._ping_task.cancel()
        # `ray.kill` only sends a message, which a process stopped by SIGSTOP never reads.
        ray.kill(self._actor)
        if self._process is not None:
            process_id.kill(self._process)

    async def _poll_events(self) -> None:
        while True:
            try:
                if self._process is None:
                    self._process = await self._actor.identify.remote()
                for item in await self._actor.next_events.remote():
                    # Ray may deliver progress events late, so ignore them once the process is up.
                    if not (self.up and isinstance(item, Progress)):
                        self._on_event(self.title, item)
            except ActorUnavailableError:
                # The process may still be alive, although Ray cannot reach it now. Try again.
                await asyncio.sleep(RETRY_SECONDS)
            except RayError as error:
                self.declare_dead(_reason(error))
                return

    async def _ping_forever(self) -> None:
        while await self._is_responsive():
            await asyncio.sleep(self._ping_timeout / 4)
        self.declare_dead(f"no reply for {self._ping_timeout:g} s (process stopped or stuck)")

    async def _is_responsive(self) -> bool:
        ping = asyncio.create_task(self._ping())
        # Wait twice for half of the timeout. If this process itself was paused, the first wait may
        # time out although the reply has arrived. The second wait then finds the reply.
        for _ in range(2):
            done, _ = await asyncio.wait({ping}, timeout=self._ping_timeout / 2)
            if done:
                return True
        ping.cancel()
        return False

    async def _ping(self) -> None:
        with suppress(RayError):  # `_poll_events` detects a dead process
            await self._actor.ping.remote()


def _reason(error: RayError) -> str:
    if isinstance(error, RayTaskError):
        return first_line(error.cause or error)
    if "node has died" in str(error):
        return "its node died"
    return "its process died (killed, crashed, or out of memory)"
