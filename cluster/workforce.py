"""The workers of one pool: made, kept alive, and let go once they have drained."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.cluster.keeper import Hosted, keep
from penstock.cluster.member import StartFailed
from penstock.cluster.notices import Progress, Report
from penstock.cluster.placement import WorkerPlace
from penstock.cluster.restarts import Retries
from penstock.cluster.slots import Phase, change

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Worker(Hosted, Protocol):
    """What fills a place; `HostedWorker` is the real one."""

    @property
    def ready(self) -> asyncio.Event:
        """Set once it has served."""
        ...

    @property
    def serves(self) -> bool: ...

    async def drain(self, seconds: float) -> None:
        """Take nothing new; what runs there goes on elsewhere, or ends, within so many seconds."""
        ...

    async def leave(self) -> None:
        """End it, and give back what it took."""
        ...

    def release(self) -> None:
        """Give back what it took."""
        ...


@dataclass(slots=True)
class _Post:
    """A place that is taken."""

    worker: Worker
    task: asyncio.Task[None] | None = None  # keeps it alive
    leaves: bool = False
    is_spoilt: bool = False

    @property
    def phase(self) -> Phase:
        if self.is_spoilt:
            return Phase.SPOILT
        if self.leaves:
            return Phase.LEAVING
        return Phase.SERVING if self.worker.serves else Phase.PENDING


class Workforce:
    """One pool.

    Args:
        places: for as many workers as it may have.
        make: makes the worker for a place.
        spawn: runs what goes on beside; an exception there ends everything.
        drain_seconds: for a worker that is to leave.
        report: told what happens.
        given_up: told the title of a worker that cannot be started, why, and in how many seconds
            its place may be filled again; what it raises ends everything.
        pause: waits those seconds.
    """

    def __init__(
        self,
        places: Sequence[WorkerPlace],
        make: Callable[[WorkerPlace], Worker],
        spawn: Spawn,
        drain_seconds: float,
        report: Report,
        given_up: Callable[[str, StartFailed, float], None],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._places = places
        self._make = make
        self._spawn = spawn
        self._drain_seconds = drain_seconds
        self._report = report
        self._given_up = given_up
        self._pause = pause
        self._posts: dict[str, _Post] = {}
        self._retries = {place.name: Retries() for place in places}

    @property
    def workers(self) -> Sequence[Worker]:
        """Those that there are, in whatever state."""
        return [post.worker for post in self._posts.values()]

    def phases(self, lent: Collection[str] = ()) -> dict[str, Phase]:
        """Of each place, by the name of the worker that it is for.

        `lent`: names of workers that have another role for now.
        """
        posts = ((place.name, self._posts.get(place.name)) for place in self._places)
        phases = {name: Phase.EMPTY if post is None else post.phase for name, post in posts}
        useful = (Phase.PENDING, Phase.SERVING)
        return {
            name: Phase.LENT if name in lent and phase in useful else phase
            for name, phase in phases.items()
        }

    def aim(self, wanted: int, busy: Mapping[str, float], lent: Collection[str] = ()) -> None:
        """Begin what brings it to so many workers.

        Args:
            wanted: those that leave already, and those lent, not counted.
            busy: how much each has to do, by name.
            lent: names of workers that have another role for now: they stay.
        """
        numbered = {at: busy.get(place.name, 0.0) for at, place in enumerate(self._places)}
        asked = change(list(self.phases(lent).values()), wanted, numbered)
        for at in asked.fill:
            self._fill(self._places[at])
        for at in asked.leave:
            name = self._places[at].name
            self._posts[name].leaves = True
            self._spawn(self._let_go(name))

    def _fill(self, place: WorkerPlace) -> None:
        post = self._posts[place.name] = _Post(self._make(place))
        post.task = self._spawn(self._keep(place.name, post))

    async def _keep(self, name: str, post: _Post) -> None:
        failure = await keep(post.worker, self._report)
        post.is_spoilt = True
        post.worker.release()
        seconds = self._retries[name].after_giving_up(served=post.worker.ready.is_set())
        self._given_up(post.worker.title, failure, seconds)
        await self._pause(seconds)
        del self._posts[name]  # free: whoever aims next may fill it

    async def _let_go(self, name: str) -> None:
        post = self._posts[name]
        assert post.task is not None
        post.task.cancel()  # one that dies now is not to come back
        await asyncio.wait((post.task,))
        if post.worker.serves:
            self._report(post.worker.title, Progress("draining: fewer workers are enough"))
            await post.worker.drain(self._drain_seconds)
        await post.worker.leave()
        del self._posts[name]
        self._report(post.worker.title, Progress("gone"))
