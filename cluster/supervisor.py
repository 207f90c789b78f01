"""Starts a cluster's processes side by side, keeps them alive, and ends them all."""

import asyncio
import secrets
from pathlib import Path

from penstock.cluster.hosted import HostedRouter, HostedWorker
from penstock.cluster.keeper import keep
from penstock.cluster.notices import Draining, GivenUp, Report, Serving
from penstock.cluster.placement import WorkerPlace, place
from penstock.cluster.session import free_nodes
from penstock.cluster.spec import ClusterSpec
from penstock.router.config import RouterConfig
from penstock.workers.config import WorkerConfig


class Supervisor:
    """A cluster, on a Ray that runs already. To be made on the event loop.

    Args:
        spec: what to start.
        model: the checkpoint folder, at the same path on every node.
        report: told of everything that happens, on the event loop.

    Raises `CannotPlace` where the nodes have no room.
    """

    def __init__(self, spec: ClusterSpec, model: Path, report: Report) -> None:
        # New at every start: the workers hear nobody but this cluster's routers.
        token = secrets.token_urlsafe(32)
        self._drain_seconds = spec.router.drain_seconds
        self._report = report
        self._router = HostedRouter(router_config(spec, model, token), report, spec.pool_nodes)
        self._workers = [
            HostedWorker(each, worker_config(spec, model, token, each), self._router, report)
            for each in place(spec, free_nodes())
        ]
        self._num_given_up = 0
        self._serving = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then drain and end everything.

        Raises:
            CannotPlace: Ray did not grant what seemed free.
            StartFailed: a process did not get ready at first, or too few are left to serve.
        """
        try:
            async with asyncio.TaskGroup() as group:
                work = [self._keep_router(), self._announce()]
                work += [self._keep_worker(worker) for worker in self._workers]
                tasks = [group.create_task(each) for each in work]
                await stop.wait()
                for task in tasks:
                    task.cancel()
            await self._drain()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await self._end()

    async def _keep_router(self) -> None:
        raise await keep(self._router, self._report)

    async def _keep_worker(self, worker: HostedWorker) -> None:
        await worker.reserve()
        failure = await keep(worker, self._report)
        self._num_given_up += 1
        # Before the first answer it is the person at the terminal who must act.
        if not self._serving or self._num_given_up == len(self._workers):
            raise failure
        self._report(worker.title, GivenUp(failure.reason))

    async def _announce(self) -> None:
        for ready in (self._router.ready, *(worker.ready for worker in self._workers)):
            await ready.wait()
        if self._router.member is not None:
            await self._router.member.call("has_workers", len(self._workers))
        self._serving = True
        self._report("", Serving(*self._router.listening))

    async def _drain(self) -> None:
        if self._router.member is not None and self._router.member.up:
            self._report("", Draining(self._drain_seconds))
            await self._router.member.call("drain", self._drain_seconds)

    async def _end(self) -> None:
        # The router first: its workers then see their streams end in order.
        if self._router.member is not None:
            await self._router.member.stop()
        members = [worker.member for worker in self._workers if worker.member is not None]
        await asyncio.gather(*(member.stop() for member in members))
        for worker in self._workers:
            worker.release()


def router_config(spec: ClusterSpec, model: Path, token: str) -> RouterConfig:
    """What the router of a cluster is started with."""
    return RouterConfig(
        model=model,
        served_name=spec.router.model_name or model.name,
        host=spec.router.host,
        http_port=spec.router.http_port,
        grpc_port=spec.router.grpc_port,
        api_keys=spec.router.api_keys,
        worker_token=token,
        max_model_len=spec.engine.max_model_len,
        max_queued_requests=spec.router.max_queued,
    )


def worker_config(spec: ClusterSpec, model: Path, token: str, where: WorkerPlace) -> WorkerConfig:
    """What one worker of a cluster is started with; its host is known where it runs."""
    return WorkerConfig(
        name=where.name,
        model=model,
        role=where.role,
        token=token,
        block_size=spec.engine.block_size,
        kv_cache_mib=spec.engine.kv_cache_mib,
        max_sequences=spec.engine.max_sequences,
        max_batched_tokens=spec.engine.max_batched_tokens,
        max_model_len=spec.engine.max_model_len,
        threads=where.threads,
        dtype=spec.engine.dtype,
        quantization=spec.engine.quantization,
        deterministic=spec.engine.deterministic,
        device="cuda" if where.gpus else "cpu",
        tp=where.tp,
        pp=where.pp,
        ep=where.ep,
    )
