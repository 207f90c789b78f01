"""One process of the cluster, from the driver's side: started, listened to, asked, stopped."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from penstock.cluster import processes
from penstock.cluster.notices import News, Progress
from penstock.cluster.processes import ProcessName
from penstock.cluster.session import first_line

SECONDS_TO_STOP = 10.0
SECONDS_BETWEEN_TRIES = 0.5
SECONDS_TO_ANSWER = 30.0


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
        patience: seconds that it may leave a question without an answer once it has started; one
            that is silent for longer is dead to us.
    """

    def __init__(
        self,
        title: str,
        actor: Any,
        tell: Callable[[str, News], None],
        patience: float = SECONDS_TO_ANSWER,
    ) -> None:
        self.title = title
        self.up = False
        self._actor = actor
        self._tell = tell
        self._patience = patience
        self._process: ProcessName | None = None  # once it has said so
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._listening = asyncio.create_task(self._listen())
        self._asking: asyncio.Task[None] | None = None

    async def start(self, config: object) -> Any:
        """Start what it hosts; returns where it listens. `StartFailed`."""
        where = await self.begin("start", config)
        self.up = True
        self.watch()
        return where

    def watch(self) -> None:
        """Have it answer from now on: it is not busy loading any more."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())

    @property
    def process(self) -> ProcessName | None:
        """None until it has said who it is."""
        return self._process

    def kill_by_ray(self) -> None:
        """Have Ray end it, and find that out like any other death."""
        ray.kill(self._actor)

    async def begin(self, method: str, *arguments: object) -> Any:
        """Call a method that is part of the start. `StartFailed`."""
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayError as error:
            certain = isinstance(error, RayTaskError)
            raise StartFailed(self.title, _reason(error), certain) from None

    async def death(self) -> str:
        """Waits until the process is dead, or as good as that; returns the reason, in one line."""
        return await asyncio.shield(self._death)

    def give_up(self, reason: str) -> None:
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
        self._listening.cancel()
        if self._asking is not None:
            self._asking.cancel()
        ray.kill(self._actor)  # a request, which one that is stopped never reads
        if self._process is not None:
            processes.end(self._process)

    async def _listen(self) -> None:
        while True:
            try:
                if self._process is None:
                    self._process = await self._actor.who.remote()
                for item in await self._actor.news.remote():
                    # Ray may deliver the answer to `start` before news that were sent earlier.
                    if not (self.up and isinstance(item, Progress)):
                        self._tell(self.title, item)
            except ActorUnavailableError:
                await asyncio.sleep(SECONDS_BETWEEN_TRIES)  # out of reach for now, perhaps alive
            except RayError as error:
                self.give_up(_reason(error))
                return

    async def _ask(self) -> None:
        while await self._answers():
            await asyncio.sleep(self._patience / 4)
        self.give_up(f"it answered nothing for {self._patience:g} s (stopped, or stuck)")

    async def _answers(self) -> bool:
        asked = asyncio.create_task(self._ping())
        # Twice half of it: this process may have been stopped itself.
        for _ in range(2):
            done, _ = await asyncio.wait({asked}, timeout=self._patience / 2)
            if done:
                return True
        asked.cancel()
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
