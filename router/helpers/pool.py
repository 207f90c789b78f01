"""The helper processes of a router, which do the work that could block its event loop."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial

from penstock.router.errors import Code, ServingError, invalid, shutting_down
from penstock.router.helpers.fork_server import ForkServer
from penstock.router.helpers.helper_process import (
    Cause,
    HelperProcess,
    Job,
    settings_job,
)
from penstock.router.helpers.replies import Reply
from penstock.router.helpers.settings import HelperSettings, encode_settings
from penstock.router.requests.fair_line import FairLine

log = logging.getLogger(__name__)

IN_FLIGHT_BYTES = 64 << 10
"""Maximum total size of the jobs that a helper process has received but not finished.

Several small jobs are thus sent before the first reply, which saves context switches. One larger
job is sent only to an idle process.
"""

RETRY_SECONDS = 1.0
"""Pause before another attempt to start a process that could not be started."""


class HelperPool:
    """Does jobs in helper processes; the jobs of each tenant are done in order of arrival.

    A job that exceeds the limits ends its process and is refused. A new process does the remaining
    jobs of that process. Tenants share the processes fairly (see `FairLine`). A job's cost is its
    bytes plus its CPU time in microseconds.

    Args:
        fork_server: starts the processes.
        settings: the settings that each process gets.

    Attributes:
        template_variables: names of the variables that the model's chat template reads.
    """

    def __init__(self, fork_server: ForkServer, settings: HelperSettings) -> None:
        self.template_variables: frozenset[str] = frozenset()
        self._fork_server = fork_server
        self._settings = encode_settings(settings)
        self._limits = settings.limits
        count = settings.limits.num_processes
        self._line: FairLine[Job] = FairLine(
            settings.bounds.max_helper_bytes, count, IN_FLIGHT_BYTES
        )
        self._helpers: list[HelperProcess | None] = [None] * count
        self._ready: set[int] = set()
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Number of jobs that have not been sent to a process."""
        return self._line.num_waiting

    async def start(self) -> None:
        """Start all processes.

        Raises:
            ServingError: the processes do not start, or the model's chat template is not valid.
        """
        try:
            await asyncio.gather(*(self._start(slot, ()) for slot in range(len(self._helpers))))
        except BaseException:
            self.close()
            raise

    async def run(
        self, kind: str, items: Sequence[bytes], tenant: str, name: str, param: str | None = None
    ) -> list[bytes]:
        """Do a job; return the items of its reply.

        Args:
            kind: name of the handler that does the job in the helper process.
            items: arguments of the handler.
            tenant: the tenant for whom the job is done.
            name: how error messages name the job's input, for example "the body".
            param: request field that the error names if the job is refused, or None.

        Raises:
            ServingError: the handler's error; INVALID if the job exceeds the limits; OVERLOADED if
                too many bytes of jobs wait; UNAVAILABLE if processes end or cannot be started.
        """
        if self._is_closed:
            raise shutting_down()
        done = asyncio.get_running_loop().create_future()
        job = Job([kind.encode(), *items], name, param, done)
        self._line.add(tenant, job, job.size)
        self._send_jobs()
        try:
            reply = await job.done
        except asyncio.CancelledError:
            self._line.remove(tenant, job)
            raise
        if reply.error is not None:
            raise reply.error
        return reply.items

    def close(self) -> None:
        """Refuse all jobs that have no reply yet, and close the connections to the processes.

        A process ends when its connection is closed.
        """
        self._is_closed = True
        for task in self._restarts.values():
            task.cancel()
        for job in self._line.clear():
            _refuse(job, shutting_down())
        for helper in self._helpers:
            if helper is not None:
                for job in helper.jobs:
                    _refuse(job, shutting_down())
                helper.close()

    def _send_jobs(self) -> None:
        while self._ready and (begun := self._line.take(self._ready)) is not None:
            helper = self._helpers[begun.slot]
            assert helper is not None
            helper.send(begun.job)

    def _on_reply(self, slot: int, job: Job, reply: Reply) -> None:
        if not job.done.done():
            job.done.set_result(reply)
        if slot in self._ready:  # not for the reply to the settings, which belongs to no tenant
            self._line.end(slot, reply.cpu_microseconds)
            self._send_jobs()

    async def _start(self, slot: int, jobs: Sequence[Job]) -> None:
        """Start a process in a slot; send it the jobs that the previous process did not do."""
        settings = settings_job(self._settings)
        helper = HelperProcess(
            self._fork_server.fork(),
            partial(self._on_reply, slot),
            lambda cause: self._on_end(slot, helper, settings, cause),
        )
        self._helpers[slot] = helper
        await helper.connect()
        helper.send(settings)
        reply = await settings.done
        if reply.error is not None:
            raise reply.error
        self.template_variables = frozenset(json.loads(reply.items[0]))
        self._ready.add(slot)
        for job in jobs:
            helper.send(job)
        self._send_jobs()

    def _on_end(self, slot: int, helper: HelperProcess, settings: Job, cause: Cause) -> None:
        """Start a new process in place of one that has ended, and refuse the job that ended it.

        If the job exceeded no limit, it is tried once more before it is refused.
        """
        self._ready.discard(slot)
        jobs = helper.jobs
        if self._is_closed:
            return
        if not settings.done.done():
            _refuse(settings, self._refusal(settings, cause, "use a simpler template"))
            return
        if jobs and (cause is not Cause.OTHER or jobs[0].was_tried):
            job = jobs.popleft()
            self._line.end(slot, round(self._limits.cpu_seconds * 1e6))
            _refuse(job, self._refusal(job, cause))
            log.warning(
                "a job is refused, because its helper process ended (exceeded limit: %s); the "
                "process is restarted",
                cause.value,
            )
        else:
            log.warning("a helper process ended (exceeded limit: %s) and is restarted", cause.value)
            if jobs:
                jobs[0].was_tried = True
        self._restarts[slot] = asyncio.create_task(self._restart(slot, jobs))

    async def _restart(self, slot: int, jobs: deque[Job]) -> None:
        while True:
            try:
                await self._start(slot, jobs)
                return
            except (ServingError, OSError) as error:
                log.error(
                    "a helper process could not be restarted; next attempt in %g s: %s",
                    *(RETRY_SECONDS, error),
                )
                for job in jobs:
                    _refuse(job, _unavailable())
                    self._line.end(slot, was_done=False)
                jobs.clear()
                if not self._ready:
                    for job in self._line.clear():
                        _refuse(job, _unavailable())
            await asyncio.sleep(RETRY_SECONDS)

    def _refusal(
        self, job: Job, cause: Cause, action: str = "send a smaller request"
    ) -> ServingError:
        limits = self._limits
        match cause:
            case Cause.CPU_TIME:
                why = f"needs more than {limits.cpu_seconds:g} s of processor time"
            case Cause.WALL_TIME:
                why = f"needs more than {limits.wall_seconds:g} s"
            case Cause.MEMORY:
                why = f"needs more than {limits.memory_bytes >> 20} MiB of memory"
            case Cause.OTHER:
                return _unavailable()
        return invalid(f"{job.name} {why}: {action}", job.param)


def _refuse(job: Job, error: ServingError) -> None:
    if not job.done.done():
        job.done.set_result(Reply(0, [], error))


def _unavailable() -> ServingError:
    return ServingError(
        Code.UNAVAILABLE, "a helper process of the server has ended: call again", retry_after=1.0
    )
