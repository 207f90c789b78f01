"""The protocol-independent part of a router: takes requests, returns streams of deltas.

Everything runs in one event loop. Events are handled one at a time; an event that is posted while
commands are executed is queued until the current event has been handled.
"""

import asyncio
import contextlib
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.common.text.chat_template import ChatTemplateError
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.router.config import RouterConfig
from penstock.router.errors import Code, ServingError, invalid
from penstock.router.observability import snapshot
from penstock.router.observability.event_log import (
    client_safe_message,
    log_ended,
    log_submit,
    log_worker,
)
from penstock.router.observability.readiness import Readiness
from penstock.router.observability.request_metrics import RequestMetrics
from penstock.router.observability.role_recorder import RoleRecorder
from penstock.router.observability.role_registry import ROLES, Assignments
from penstock.router.requests.request import (
    GenerationRequest,
    ModelLimits,
    ResumeState,
    check_bad_words,
    check_prompt,
    resolve_sampling,
    stop_options,
)
from penstock.router.requests.response_stream import BestOfRanker, RequestOutput, ResponseStream
from penstock.router.requests.resume import check_resume_state, resume
from penstock.router.routing import events as ev
from penstock.router.routing.dispatcher import Dispatcher, WorkerStatus
from penstock.router.worker_links.links import WorkerLinks
from penstock.router.worker_links.worker_link import RouterIdentity

log = logging.getLogger(__name__)

TICK_SECONDS = 0.1

CODES: Mapping[ev.Status, Code] = {
    ev.Status.DEADLINE: Code.DEADLINE,
    ev.Status.INVALID: Code.INVALID,
    ev.Status.OVERLOADED: Code.OVERLOADED,
    ev.Status.UNAVAILABLE: Code.UNAVAILABLE,
    ev.Status.INTERNAL: Code.INTERNAL,
}


class Frontend:
    """The connection between client calls, the dispatcher and the worker links.

    Args:
        config: configuration of the router.
        tokenizer: tokenizer and chat template of the model.
        limits: limits from the model's own configuration.
        dispatcher: decides which commands follow from each event.
        incarnation: random id, new at each start of the router.
        tenants: name of each tenant in metrics; does not reveal the API key.
    """

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: ModelTokenizer,
        limits: ModelLimits,
        dispatcher: Dispatcher,
        incarnation: str,
        tenants: Mapping[str, str],
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.metrics = RequestMetrics(tenants)
        self.is_draining = False
        self.scaling = snapshot.Scaling()  # as last reported by the supervisor
        self.roles = RoleRecorder(lambda worker, role: self.post(ev.RoleChanged(worker, role)))
        self.routers: Sequence[snapshot.RouterState] = ()  # all, as reported by the supervisor
        # Called with the name and the address of a stuck worker, and the reason.
        self.on_stuck_worker: Callable[[str, str, str], None] = lambda worker, address, reason: None
        self._limits = limits
        self._dispatcher = dispatcher
        identity = RouterIdentity(config.name, incarnation, config.worker_token)
        self._links = WorkerLinks(identity, self.post)
        self._outputs: dict[int, RequestOutput] = {}
        self._events: deque[ev.Event] = deque()
        self._is_handling = False
        self._request_ids = itertools.count(1)
        self._readiness_listeners: list[Callable[[str], None]] = []
        self._readiness = Readiness(config.waits_for_both, config.wakes_workers)
        self._loop = asyncio.get_running_loop()
        self._reported_reason = self.why_not_ready()  # last reason passed to listeners
        self._clock = asyncio.create_task(self._tick(), name="router clock")

    # ------------------------------------------------------------ the model and its state

    @property
    def model(self) -> ModelLimits:
        """Limits for requests: the smallest of the model's and the connected workers' limits."""
        return self._links.model_limits(self._limits)

    def check_model(self, name: str | None) -> None:
        """Raise NOT_FOUND if `name` is given and is not the served model."""
        if name and name != self._limits.name:
            raise ServingError(
                Code.NOT_FOUND,
                f"the model {name[:80]!r} does not exist here; {self._limits.name!r} does",
                "model",
            )

    def why_not_ready(self) -> str:
        """Return why requests cannot be served now, or an empty string if they can."""
        if self.is_draining:
            return "the router is draining"
        workers = self.workers()
        roles = [worker.role for worker in workers if worker.state == "ready"]
        return self._readiness.not_ready_reason(roles, len(workers), self._loop.time())

    @property
    def num_workers(self) -> int:
        """Number of workers with an open stream."""
        return len(self._links)

    def workers(self) -> Sequence[WorkerStatus]:
        """Return the status of all workers with an open stream."""
        return self._dispatcher.workers()

    @property
    def num_open_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._outputs)

    def take_snapshot(self) -> snapshot.ClusterState:
        """Return the current state of the router and its workers."""
        why_not = self.why_not_ready()
        own = "draining" if self.is_draining else "waiting" if why_not else "ready"
        return snapshot.snapshot_cluster(
            snapshot.RouterState(self.config.name, own),
            self._limits.name,
            why_not,
            self._links.all_links(),
            self._dispatcher,
            self.metrics,
            self.scaling,
            self.roles.assignments,
            self.routers,
        )

    def on_readiness(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the result of `why_not_ready`, now and after each change."""
        self._readiness_listeners.append(listener)
        listener(self._reported_reason)

    def _report_readiness(self) -> None:
        why = self.why_not_ready()
        if why != self._reported_reason:
            self._reported_reason = why
            for changed in self._readiness_listeners:
                changed(why)

    # ------------------------------------------------------------ client calls

    async def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences that spell the bad words."""
        check_bad_words(words, self.config.bounds)
        return await self.tokenizer.encode_bad_words(words)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation; raise INVALID if it cannot be rendered."""
        try:
            return await self.tokenizer.encode_chat(messages)
        except ChatTemplateError as error:
            raise invalid(str(error), "messages") from error

    def submit(self, requests: Sequence[GenerationRequest]) -> ResponseStream:
        """Check all requests of a call, then submit them together.

        Returns:
            The stream of answers; the caller must always close it.

        Raises:
            ServingError: a request is refused; no request of the call is submitted.
        """
        if self.is_draining:
            raise ServingError(
                Code.UNAVAILABLE, "the server is shutting down: call again", retry_after=1.0
            )
        if not 0 < len(requests) <= self.config.bounds.max_prompts:
            raise invalid(f"send 1 to {self.config.bounds.max_prompts} prompts", "prompt")
        answers = ResponseStream(self.config.bounds.max_unread_tokens, self._cancel)
        taken = [self._prepare(each, index, answers) for index, each in enumerate(requests)]
        # All checks have passed: no request of the call is refused from here on.
        self._outputs.update({request.id: track for request, track in taken})
        try:
            for request, track in taken:
                self.metrics.opened(request, self._loop.time())
                track.deliver_finished_before()
                self.post(ev.RequestArrived(request))
        except BaseException:
            answers.close()
            raise
        return answers

    def _prepare(
        self, generation: GenerationRequest, index: int, stream: ResponseStream
    ) -> tuple[ev.Request, RequestOutput]:
        model, bounds = self.model, self.config.bounds
        check_prompt(generation.prompt, model)
        params = resolve_sampling(generation, model, bounds)
        check_resume_state(generation, params, model)
        timeout, num_choices = self._timeout(generation), params.num_generated
        options = stop_options(params)
        texts = [self.tokenizer.detokenizer(options) for _ in range(num_choices)]
        past = resume(generation, params, model, texts)
        number = next(self._request_ids)
        stream.add_request(number, params.seed or 0)
        ranking = None
        if params.is_ranked:
            ranking = BestOfRanker(num_choices, params.n, params.logprobs is not None)
        track = RequestOutput(
            stream,
            index,
            texts,
            frozenset(params.stop_token_ids),
            lambda choice, length: self.post(ev.ChoiceStopped(number, choice, length)),
            ranking,
            past,
        )
        nothing = ResumeState()
        request = ev.Request(
            id=number,
            prompt=generation.prompt,
            params=params.for_worker(),
            num_choices=num_choices,
            num_beams=params.num_sequences if params.use_beam_search else 0,
            max_tokens=params.answer_limit(len(generation.prompt), model.max_model_len),
            tenant=generation.tenant,
            salt=generation.tenant.encode(),
            deadline=self._loop.time() + timeout,
            log=[
                generation.resume_from.get(choice, nothing).tokens for choice in range(num_choices)
            ],
            ended=[end is not None for end in past],
            external_id=generation.request_id,
        )
        return request, track

    def _timeout(self, request: GenerationRequest) -> float:
        """Return the time limit of a request in seconds."""
        if request.timeout is None:
            return self.config.timeout
        if not (request.timeout > 0 and math.isfinite(request.timeout)):
            raise invalid("the timeout must be a positive number of seconds", "timeout")
        return min(self.config.timeout, request.timeout)

    def _cancel(self, requests: Sequence[int]) -> None:
        for request in requests:
            if self._outputs.pop(request, None) is not None:
                log_ended(self.metrics.ended(request, ev.Status.CANCELLED, self._loop.time()))
                self.post(ev.ClientDisconnected(request))

    # ------------------------------------------------------------ events and commands

    def post(self, event: ev.Event) -> None:
        """Handle an event now or, if another event is being handled, after that event."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                event = self._events.popleft()
                now = self._loop.time()
                commands = self._dispatcher.handle(event, now)
                self.metrics.delivered(commands, now)
                for command in commands:
                    self._execute(command, now)
                if isinstance(event, ev.WorkerUp | ev.WorkerLost | ev.RoleChanged | ev.Tick):
                    self._report_readiness()
                    log_worker(event)
                elif isinstance(event, ev.Received):
                    self.metrics.received(event, now)
        finally:
            self._is_handling = False

    def _execute(self, command: ev.Command, now: float) -> None:
        match command:
            case ev.Deliver():
                track = self._outputs.get(command.request)
                if track is not None:
                    track.deliver(command)
            case ev.DeliverPrompt():
                track = self._outputs.get(command.request)
                if track is not None:
                    track.deliver_prompt(command)
            case ev.EndRequest():
                log_ended(self.metrics.ended(command.request, command.status, now))
                self._finish(command)
            case ev.CloseStream():
                log.warning("worker %s: %s", command.worker, command.reason)
                address = self._links.close(command.worker, command.reason)
                if command.stuck:
                    self.on_stuck_worker(command.worker, address, command.reason)
            case _:
                if isinstance(command, ev.Send):
                    self.metrics.sent(command, now)
                elif isinstance(command, ev.Submit):
                    self.metrics.submitted(command, now)
                    log_submit(command)
                self._links.send(command)

    def _finish(self, end: ev.EndRequest) -> None:
        track = self._outputs.pop(end.request, None)
        if track is None:
            return
        code = CODES.get(end.status)
        error = None
        if code is not None:
            error = ServingError(code, client_safe_message(end.message), None, end.retry_after)
        track.stream.request_ended(end.request, error)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self.post(ev.Tick())
            except Exception:  # a bug in the dispatcher must not stop the clock
                log.exception("handling a Tick event failed")

    # ------------------------------------------------------------ workers

    async def set_workers(self, addresses: Mapping[str, str]) -> None:
        """Connect to exactly the workers in `addresses` (name to `host:port`)."""
        await self._links.set_workers(addresses)

    async def assign(self, worker: str, role: str) -> None:
        """Assign a role to a worker and to later workers of the same name.

        The call returns once the supervisor, if there is one, has recorded the role.

        Raises:
            ServingError: INVALID for an unknown role, NOT_FOUND for an unknown worker,
                UNAVAILABLE if the supervisor does not confirm the role.
        """
        if role not in ROLES:
            raise invalid(f"unknown role {role[:80]!r}: use one of {', '.join(ROLES)}", "role")
        names = sorted(link.worker for link in self._links.all_links())
        if worker not in names:
            raise ServingError(
                Code.NOT_FOUND,
                f"unknown worker {worker[:80]!r}: the workers are {', '.join(names) or 'none'}",
                "worker",
            )
        await self.roles.record(worker, role)

    def set_roles(self, assignments: Assignments) -> None:
        """Merge role assignments of all routers into `roles`; keep the newest for each worker."""
        self.roles.merge(assignments)

    def worker_died(self, name: str) -> None:
        """Treat a worker as lost at once, because its process is known to have exited."""
        self._links.close(name, "its process has exited")

    # ------------------------------------------------------------ shutdown

    async def drain(self, seconds: float) -> None:
        """Refuse new requests and wait up to `seconds` for running ones to end."""
        self.is_draining = True
        self._report_readiness()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._outputs:
                    await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End open calls with UNAVAILABLE and close the streams to all workers."""
        self.is_draining = True
        self._report_readiness()
        error = ServingError(Code.UNAVAILABLE, "the server is shutting down", retry_after=1.0)
        for track in list(self._outputs.values()):
            track.stream.fail(error)
        await self._links.set_workers({})
        self._clock.cancel()
        self.tokenizer.close()
