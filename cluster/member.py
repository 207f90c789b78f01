"""One process of the cluster, from the driver's side: started, listened to, stopped."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from penstock.cluster.notices import News
from penstock.cluster.session import first_line

SECONDS_TO_STOP = 10.0
SECONDS_BETWEEN_TRIES = 0.5


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


class Member:
    """A process hosted by Ray.

    Args:
        title: who it is.
        actor: its handle; nobody else calls it.
        tell: takes the process's title and its news.
    """

    def __init__(self, title: str, actor: Any, tell: Callable[[str, News], None]) -> None:
        self.title = title
        self.up = False
        self._actor = actor
        self._tell = tell
        self._death = asyncio.create_task(self._listen())

    async def start(self, config: object) -> Any:
        """Start what it hosts; returns where it listens. `StartFailed`."""
        where = await self.begin("start", config)
        self.up = True
        return where

    async def begin(self, method: str, *arguments: object) -> Any:
        """Call a method that is part of the start. `StartFailed`."""
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayError as error:
            certain = isinstance(error, RayTaskError)
            raise StartFailed(self.title, _reason(error), certain) from None

    async def death(self) -> str:
        """Waits until the process is dead; returns the reason, in one line."""
        return await asyncio.shield(self._death)

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
        self._death.cancel()
        ray.kill(self._actor)

    async def _listen(self) -> str:
        while True:
            try:
                for item in await self._actor.news.remote():
                    self._tell(self.title, item)
            except ActorUnavailableError:
                await asyncio.sleep(SECONDS_BETWEEN_TRIES)  # out of reach for now, perhaps alive
            except RayError as error:
                return _reason(error)


def _reason(error: RayError) -> str:
    if isinstance(error, RayTaskError):
        return first_line(error.cause or error)
    if "node has died" in str(error):
        return "its node died"
    return "its process died (killed, crashed, or out of memory)"
