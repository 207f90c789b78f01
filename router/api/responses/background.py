"""Responses that are generated in the background, while no client waits for them."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial

from penstock.router.api.generation.calls import SubmittedCall
from penstock.router.api.generation.response import Answers
from penstock.router.api.http import internal_error
from penstock.router.api.responses.event_log import EventBytes, EventLog, EventLogs
from penstock.router.api.responses.formatter import ResponsesFormatter
from penstock.router.api.responses.response_object import Outcome, ResponseObject
from penstock.router.api.responses.stored import StoredItems
from penstock.router.errors import Code, ServingError
from penstock.router.requests.background_tasks import BackgroundTasks
from penstock.router.requests.response_stream import ClientDisconnectedError
from penstock.router.requests.slices import Slices

log = logging.getLogger(__name__)

MAX_PER_TENANT = 256
"""Maximum number of background responses that are generated at a time for one tenant."""

RETRY_SECONDS = 1.0


class BackgroundRun:
    """One response that is being generated.

    Args:
        response: the constant members of the response.
        items: all items of its input.
        call: the submitted call.
        formatter: formats the answer, and records the response when it has ended.
        events: log for the events of the response, or None if the events are not stored.
    """

    def __init__(
        self,
        response: ResponseObject,
        items: Sequence[StoredItems],
        call: SubmittedCall,
        formatter: ResponsesFormatter,
        events: EventLog | None = None,
    ) -> None:
        self.response = response
        self.input = items
        self.events = events
        self.task: asyncio.Task[None] | None = None
        self._answers = call.answers
        self._formatter = formatter
        self._status = "queued"

    def body(self) -> Iterable[str]:
        """Return the response as it is now, as JSON in fragments."""
        return self.response.json(Outcome(self._status))

    def cancel(self) -> None:
        """Cancel the response; `task` then ends soon."""
        self._answers.close()

    async def run(self) -> None:
        """Read the answer to its end."""
        try:
            await self._run(Slices())
        finally:
            if self.events is not None:
                self.events.end()

    async def _run(self, slices: Slices) -> None:
        try:
            if self.events is None:
                await self._read_whole(slices)
            else:
                await self._read_events(self.events, slices)
            return
        except ClientDisconnectedError:
            outcome = Outcome("cancelled")
        except ServingError as error:
            outcome = Outcome("failed", error=error)
        except Exception:  # a bug must not keep the response from ending
            log.exception("generating the background response %s failed", self.response.id)
            outcome = Outcome("failed", error=internal_error())
        finally:
            self._answers.close()
        await self._end_early(outcome, slices)

    async def _read_whole(self, slices: Slices) -> None:
        answers = Answers()
        try:
            async for delta in self._answers:
                self._status = "in_progress"
                answers.add(delta)
                await slices.pause()
            for _ in self._formatter.full_response(await answers.merged()):
                await slices.pause()
        finally:
            await answers.release()

    async def _read_events(self, events: EventLog, slices: Slices) -> None:
        await events.add(self._formatter.queued_events(), slices)
        async for delta in self._answers:
            self._status = "in_progress"
            await events.add(self._formatter.chunk(delta), slices)
            # The only choice has ended. Return now, so that canceling the response no longer has an
            # effect.
            if delta.finish:
                return

    async def _end_early(self, outcome: Outcome, slices: Slices) -> None:
        """End a canceled or failed response; a failed response also gets a last event."""
        if self.events is not None and outcome.error is not None:
            try:
                failed = self._formatter.failed_events(outcome.error)
                await self.events.add(failed, slices, are_last=True)
                return
            except Exception:  # the bug that ended the response probably caused this error too
                log.exception(
                    "building the last event of the background response %s failed", self.response.id
                )
        for _ in self._formatter.ended_early(outcome):
            await slices.pause()


class BackgroundRuns:
    """The running background responses of all tenants; each one runs in one of the `tasks`."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks
        self._runs: dict[str, dict[str, BackgroundRun]] = {}  # running responses, by tenant and id
        self._ended_logs = EventLogs()
        self._running_bytes = EventBytes()

    def new_events(self, tenant: str) -> EventLog:
        """Return a new event log, whose bytes count towards the limits for running responses."""
        return EventLog(partial(self._running_bytes.take, tenant))

    def check_limit(self, tenant: str) -> None:
        """Refuse another response of a tenant that already runs the maximum number.

        Raises:
            ServingError: OVERLOADED.
        """
        if len(self._runs.get(tenant, ())) >= MAX_PER_TENANT:
            raise ServingError(
                Code.OVERLOADED,
                f"this API key already has {MAX_PER_TENANT} background responses in progress, the "
                "maximum: call again later",
                "background",
                RETRY_SECONDS,
            )

    def start(self, tenant: str, run: BackgroundRun) -> None:
        """Start to generate a response; cancel it if the tenant's limit is reached by now.

        Raises:
            ServingError: OVERLOADED.
        """
        try:
            self.check_limit(tenant)
        except ServingError:
            run.cancel()
            raise
        own = self._runs.setdefault(tenant, {})
        own[run.response.id] = run
        run.task = self._tasks.start(run.run(), "background response")
        run.task.add_done_callback(lambda task: self._ended(tenant, run))

    def get(self, tenant: str, name: str) -> BackgroundRun | None:
        """Return a running response of a tenant, or None if the tenant runs none with this id."""
        return self._runs.get(tenant, {}).get(name)

    def events(self, tenant: str, name: str) -> EventLog | None:
        """Return the events of a running or ended response, or None if they are not stored."""
        run = self.get(tenant, name)
        return self._ended_logs.get(tenant, name) if run is None else run.events

    async def delete(self, tenant: str, name: str) -> None:
        """Cancel a response if it is running, and remove its events."""
        await self.cancel(tenant, name)
        self._ended_logs.delete(tenant, name)

    async def cancel(self, tenant: str, name: str) -> None:
        """Cancel a response if it is running, and wait until it has ended."""
        run = self.get(tenant, name)
        if run is not None and run.task is not None:
            run.cancel()
            await asyncio.wait((run.task,))

    def _ended(self, tenant: str, run: BackgroundRun) -> None:
        if run.events is not None:
            self._running_bytes.release(tenant, run.events.num_bytes)
            self._ended_logs.put(tenant, run.response.id, run.events)
        own = self._runs[tenant]
        del own[run.response.id]
        if not own:
            del self._runs[tenant]
