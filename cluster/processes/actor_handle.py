"""One process of the cluster, from the driver's side: started, listened to, asked, stopped."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from penstock.cluster.processes import process_id
from penstock.cluster.processes.process_id import ProcessId
from penstock.cluster.ray_session import first_line
from penstock.cluster.status.status_events import ProcessEvent, Progress

SECONDS_TO_STOP = 10.0
RETRY_SECONDS = 0.5
PING_TIMEOUT_SECONDS = 30.0


class StartFailed(RuntimeError):
    """A process did not get ready.

    Args:
        title: whose it was.
        reason: one line.
        certain: it would fail again: the process itself said why.
    """

    def __init__(self, title: str, reason: str, certain: bool) -> None:
        super().__init__(f"{title} did not start: {reason}")
        self.reason = reason
        self.certain = certain


class ActorHandle:
    """A process hosted by Ray.

    Args:
        title: who it is.
        actor: its handle; nobody else calls it.
        tell: takes the process's title and its news.
        patience: seconds that it may leave a question without an answer once it has started; one
            that is silent for longer is dead to us.
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
        self._process: ProcessId | None = None  # once it has said so
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._events_task = asyncio.create_task(self._poll_events())
        self._ping_task: asyncio.Task[None] | None = None

    async def start(self, config: object) -> Any:
        """Start what it hosts; returns where it listens. `StartFailed`."""
        where = await self.call_start("start", config)
        self.up = True
        self.start_pinging()
        return where

    def start_pinging(self) -> None:
        """Have it answer from now on: it is not busy loading any more."""
        if self._ping_task is None:
            self._ping_task = asyncio.create_task(self._ping_forever())

    @property
    def process(self) -> ProcessId | None:
        """None until it has said who it is."""
        return self._process

    def kill_by_ray(self) -> None:
        """Have Ray end it, and find that out like any other death."""
        ray.kill(self._actor)

    async def call_start(self, method: str, *arguments: object) -> Any:
        """Call a method that is part of the start. `StartFailed`."""
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayError as error:
            certain = isinstance(error, RayTaskError)
            raise StartFailed(self.title, _reason(error), certain) from None

    async def death(self) -> str:
        """Waits until the process is dead, or as good as that; returns the reason, in one line."""
        return await asyncio.shield(self._death)

    def declare_dead(self, reason: str) -> None:
        """Somebody has seen that it is of no use any more: it counts as dead."""
        if not self._death.done():
            self._death.set_result(reason)

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method; None where the process is dead, which is somebody else's care."""
        with suppress(RayActorError):
            return await getattr(self._actor, method).remote(*arguments)

    async def stop(self) -> None:
        """Ask it to stop, within a bound; then it is ended."""
        if self.up:
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(self.call("stop"), SECONDS_TO_STOP)
        self.kill()

    def kill(self) -> None:
        """End it, whether it still answers or not."""
        self._events_task.cancel()
        if self._ping_task is not None:
            self._ping_task.cancel()
        ray.kill(self._actor)  # a request, which one that is stopped never reads
        if self._process is not None:
            process_id.kill(self._process)

    async def _poll_events(self) -> None:
        while True:
            try:
                if self._process is None:
                    self._process = await self._actor.identify.remote()
                for item in await self._actor.next_events.remote():
                    # Ray may deliver the answer to `start` before news that were sent earlier.
                    if not (self.up and isinstance(item, Progress)):
                        self._on_event(self.title, item)
            except ActorUnavailableError:
                await asyncio.sleep(RETRY_SECONDS)  # out of reach for now, perhaps alive
            except RayError as error:
                self.declare_dead(_reason(error))
                return

    async def _ping_forever(self) -> None:
        while await self._is_responsive():
            await asyncio.sleep(self._ping_timeout / 4)
        self.declare_dead(f"it answered nothing for {self._ping_timeout:g} s (stopped, or stuck)")

    async def _is_responsive(self) -> bool:
        ping = asyncio.create_task(self._ping())
        # Twice half of it: this process may have been stopped itself.
        for _ in range(2):
            done, _ = await asyncio.wait({ping}, timeout=self._ping_timeout / 2)
            if done:
                return True
        ping.cancel()
        return False

    async def _ping(self) -> None:
        with suppress(RayError):  # whoever listens learns that it is dead
            await self._actor.ping.remote()


def _reason(error: RayError) -> str:
    if isinstance(error, RayTaskError):
        return first_line(error.cause or error)
    if "node has died" in str(error):
        return "its node died"
    return "its process died (killed, crashed, or out of memory)"
