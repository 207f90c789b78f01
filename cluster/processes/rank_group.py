"""A worker's ranks, each a process of its own, as one: they start, live and die together."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.cluster.processes.actor_handle import ActorHandle
from penstock.workers.config import WorkerConfig


class RankGroup:
    """The processes of one worker; the first leads. One that dies takes the others with it.

    Args:
        members: one a rank, in their order.
    """

    def __init__(self, ranks: Sequence[ActorHandle]) -> None:
        self._ranks = ranks
        self._leader = ranks[0]

    @property
    def ranks(self) -> Sequence[ActorHandle]:
        """In the order of ranks."""
        return self._ranks

    @property
    def up(self) -> bool:
        return self._leader.up

    async def start(self, config: object) -> Any:
        """Start all, with a `WorkerConfig`; returns where the worker listens. `StartFailed`, of
        whoever failed first."""
        assert isinstance(config, WorkerConfig)
        if len(self._ranks) == 1:
            return await self._leader.start(config)  # which has it watched
        rendezvous = await self._leader.call_start("open_rendezvous", config)
        starts = [asyncio.create_task(self._leader.start(config))]
        for rank, member in enumerate(self._ranks[1:], 1):
            follow = member.call_start("follow", replace(config, rank=rank), rendezvous)
            starts.append(asyncio.create_task(follow))
        try:
            where, *_ = await asyncio.gather(*starts)
        finally:
            for task in starts:  # those that wait for one that failed would wait for long
                task.cancel()
        for member in self._ranks[1:]:
            member.start_pinging()
        return where

    async def death(self) -> str:
        """Waits until one of them is dead; returns the reason, in one line."""
        deaths = [asyncio.create_task(self._death(rank)) for rank in range(len(self._ranks))]
        try:
            done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in deaths:
                task.cancel()

    async def _death(self, rank: int) -> str:
        reason = await self._ranks[rank].death()
        return reason if len(self._ranks) == 1 else f"rank {rank}: {reason}"

    def declare_dead(self, reason: str) -> None:
        """Somebody has seen that it is of no use any more: it counts as dead."""
        self._leader.declare_dead(reason)

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the one that leads; None where it is dead."""
        return await self._leader.call(method, *arguments)

    async def stop(self) -> None:
        """Ask the one that leads to stop, within a bound; then all are ended."""
        await self._leader.stop()
        self.kill()

    def kill(self) -> None:
        for member in self._ranks:
            member.kill()
