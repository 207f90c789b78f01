"""Manages the processes of a worker's ranks as if they were a single process."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.cluster.processes.actor_handle import ActorHandle
from penstock.workers.config import WorkerConfig


class RankGroup:
    """The processes of one worker. The group is dead as soon as one of them is dead.

    Args:
        ranks: the handle of each rank's process, in the order of ranks.
    """

    def __init__(self, ranks: Sequence[ActorHandle]) -> None:
        self._ranks = ranks
        self._leader = ranks[0]

    @property
    def ranks(self) -> Sequence[ActorHandle]:
        """The handle of each rank's process, in the order of ranks."""
        return self._ranks

    async def start(self, config: object) -> Any:
        """Start all ranks and return the worker's address.

        Args:
            config: the `WorkerConfig` of the worker.

        Raises:
            StartFailed: the error of the first rank that failed.
        """
        assert isinstance(config, WorkerConfig)
        if len(self._ranks) == 1:
            return await self._leader.start(config)  # `ActorHandle.start` also starts the pings
        rendezvous = await self._leader.call_start("open_rendezvous", config)
        starts = [asyncio.create_task(self._leader.start(config))]
        for rank, member in enumerate(self._ranks[1:], 1):
            follow = member.call_start("follow", replace(config, rank=rank), rendezvous)
            starts.append(asyncio.create_task(follow))
        try:
            where, *_ = await asyncio.gather(*starts)
        finally:
            for task in starts:  # if one rank has failed, the other ranks would wait for it forever
                task.cancel()
        for member in self._ranks[1:]:
            member.start_pinging()
        return where

    async def death(self) -> str:
        """Wait until any rank is dead. Return the reason, in one line."""
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
        """Let `death` return `reason`, although the worker's processes may still run."""
        self._leader.declare_dead(reason)

    async def drain(self, seconds: float) -> None:
        """Drain rank 0, which serves the requests. Wait at most slightly longer than `seconds`."""
        await self._leader.drain(seconds)

    async def stop(self) -> None:
        """Send a stop request to rank 0, wait for a limited time, then kill all ranks."""
        await self._leader.stop()
        self.kill()

    def kill(self) -> None:
        for member in self._ranks:
            member.kill()
