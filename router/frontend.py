"""What every protocol sits on: requests in, deltas out, with the deciding code in between.

Everything runs in one event loop. Events are handled one after the other, each to its end, also
those that come up while commands are carried out.
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
from penstock.router import state
from penstock.router.answers import Answers, Ranking, Track
from penstock.router.ask import (
    Ask,
    Model,
    SoFar,
    check_bad_words,
    check_prompt,
    resolve_sampling,
    stop_options,
)
from penstock.router.config import RouterConfig
from penstock.router.errors import Code, ServingError, invalid
from penstock.router.links import Links
from penstock.router.logged import log_ended, log_placed, log_worker, presentable
from penstock.router.readiness import Readiness
from penstock.router.resume import check_so_far, resume
from penstock.router.role_recorder import RoleRecorder
from penstock.router.roles import ROLES, Assignments
from penstock.router.routing import events as ev
from penstock.router.routing.dispatcher import Dispatcher, WorkerStatus
from penstock.router.tally import Tally
from penstock.router.worker_link import Identity

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
    """The router's heart: a dispatcher, links to the workers, and the calls of the clients.

    Args:
        config: the router's.
        text: tokenizer and templates of the model.
        limits: of the model as its own configuration has them.
        dispatcher: decides.
        incarnation: random, new at each start.
        tenants: what tenants are called in metrics, which name nobody's key.
    """

    def __init__(
        self,
        config: RouterConfig,
        text: ModelTokenizer,
        limits: Model,
        dispatcher: Dispatcher,
        incarnation: str,
        tenants: Mapping[str, str],
    ) -> None:
        self.config = config
        self.text = text
        self.tally = Tally(tenants)
        self.is_draining = False
        self.scaling = state.Scaling()  # what the supervisor said last
        self.roles = RoleRecorder(lambda worker, role: self.tell(ev.RoleChanged(worker, role)))
        self.routers: Sequence[state.RouterState] = ()  # the same, of itself too
        # Told the name and address of a worker that does not get on, and why.
        self.tell_stuck: Callable[[str, str, str], None] = lambda worker, address, reason: None
        self._limits = limits
        self._dispatcher = dispatcher
        identity = Identity(config.name, incarnation, config.worker_token)
        self._links = Links(identity, self.tell)
        self._tracks: dict[int, Track] = {}
        self._events: deque[ev.Event] = deque()
        self._is_handling = False
        self._numbers = itertools.count(1)
        self._watchers: list[Callable[[str], None]] = []
        self._readiness = Readiness(config.waits_for_both, config.wakes_workers)
        self._loop = asyncio.get_running_loop()
        self._told = self.why_not_ready()  # what the watchers heard last
        self._clock = asyncio.create_task(self._tick(), name="router clock")

    # ------------------------------------------------------------ the model and its state

    @property
    def model(self) -> Model:
        """The model's bounds as they are now: prompts are checked against them."""
        return self._links.bound(self._limits)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not the one served; no name is the only one there is."""
        if name and name != self._limits.name:
            raise ServingError(
                Code.NOT_FOUND,
                f"the model {name[:80]!r} does not exist here; {self._limits.name!r} does",
                "model",
            )

    def why_not_ready(self) -> str:
        """Empty if requests can be served now."""
        if self.is_draining:
            return "the router is draining"
        workers = self.workers()
        roles = [worker.role for worker in workers if worker.state == "ready"]
        return self._readiness.reason_not(roles, len(workers), self._loop.time())

    @property
    def num_workers(self) -> int:
        """Workers whose stream is open."""
        return len(self._links)

    def workers(self) -> Sequence[WorkerStatus]:
        """The workers that have a stream."""
        return self._dispatcher.workers()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._tracks)

    def look(self) -> state.ClusterState:
        """The router and its workers as they are now."""
        why_not = self.why_not_ready()
        own = "draining" if self.is_draining else "waiting" if why_not else "ready"
        return state.look(
            state.RouterState(self.config.name, own),
            self._limits.name,
            why_not,
            self._links.wanted(),
            self._dispatcher,
            self.tally,
            self.scaling,
            self.roles.held,
            self.routers,
        )

    def watch(self, changed: Callable[[str], None]) -> None:
        """Have `changed` called with what `why_not_ready` says, now and when it changes."""
        self._watchers.append(changed)
        changed(self._told)

    def _look(self) -> None:
        why = self.why_not_ready()
        if why != self._told:
            self._told = why
            for changed in self._watchers:
                changed(why)

    # ------------------------------------------------------------ what clients do

    async def bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Bad words as the token sequences that spell them."""
        check_bad_words(words, self.config.bounds)
        return await self.text.encode_bad_words(words)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation; INVALID where it cannot be rendered."""
        try:
            return await self.text.encode_chat(messages)
        except ChatTemplateError as error:
            raise invalid(str(error), "messages") from error

    def open(self, asks: Sequence[Ask]) -> Answers:
        """Take a call: check every ask, then send them all on their way.

        Raises `ServingError` where one is refused at once. The answers must be closed, whatever
        happens.
        """
        if self.is_draining:
            raise ServingError(
                Code.UNAVAILABLE, "the server is shutting down: call again", retry_after=1.0
            )
        if not 0 < len(asks) <= self.config.bounds.max_prompts:
            raise invalid(f"send 1 to {self.config.bounds.max_prompts} prompts", "prompt")
        answers = Answers(self.config.bounds.max_unread_tokens, self._let_go)
        taken = [self._take(ask, index, answers) for index, ask in enumerate(asks)]
        # From here on nothing is refused by a check: either all are sent on their way or none.
        self._tracks.update({request.id: track for request, track in taken})
        try:
            for request, track in taken:
                self.tally.opened(request, self._loop.time())
                track.deliver_past()
                self.tell(ev.Arrived(request))
        except BaseException:
            answers.close()
            raise
        return answers

    def _take(self, ask: Ask, index: int, answers: Answers) -> tuple[ev.Request, Track]:
        model, bounds = self.model, self.config.bounds
        check_prompt(ask.prompt, model)
        params = resolve_sampling(ask, model, bounds)
        check_so_far(ask, params, model)
        timeout, num_choices = self._timeout(ask), params.num_generated
        options = stop_options(params)
        texts = [self.text.detokenizer(options) for _ in range(num_choices)]
        past = resume(ask, params, model, texts)
        number = next(self._numbers)
        answers.opened(number, params.seed or 0)
        ranking = None
        if params.is_ranked:
            ranking = Ranking(num_choices, params.n, params.logprobs is not None)
        track = Track(
            answers,
            index,
            texts,
            frozenset(params.stop_token_ids),
            lambda choice, length: self.tell(ev.Cut(number, choice, length)),
            ranking,
            past,
        )
        nothing = SoFar()
        request = ev.Request(
            id=number,
            prompt=ask.prompt,
            params=params.for_worker(),
            num_choices=num_choices,
            num_beams=params.num_sequences if params.use_beam_search else 0,
            max_tokens=params.answer_limit(len(ask.prompt), model.max_model_len),
            tenant=ask.tenant,
            salt=ask.tenant.encode(),
            deadline=self._loop.time() + timeout,
            log=[ask.so_far.get(choice, nothing).tokens for choice in range(num_choices)],
            ended=[end is not None for end in past],
            trace=ask.trace,
        )
        return request, track

    def _timeout(self, ask: Ask) -> float:
        """Seconds that a request has."""
        if ask.timeout is None:
            return self.config.timeout
        if not (ask.timeout > 0 and math.isfinite(ask.timeout)):
            raise invalid("the timeout must be a positive number of seconds", "timeout")
        return min(self.config.timeout, ask.timeout)

    def _let_go(self, requests: Sequence[int]) -> None:
        for request in requests:
            if self._tracks.pop(request, None) is not None:
                log_ended(self.tally.ended(request, ev.Status.CANCELLED, self._loop.time()))
                self.tell(ev.Gone(request))

    # ------------------------------------------------------------ events and commands

    def tell(self, event: ev.Event) -> None:
        """Have an event handled, now or right after the one that is being handled."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                event = self._events.popleft()
                now = self._loop.time()
                commands = self._dispatcher.handle(event, now)
                self.tally.delivered(commands, now)
                for command in commands:
                    self._carry_out(command, now)
                if isinstance(event, ev.WorkerUp | ev.WorkerLost | ev.RoleChanged | ev.Tick):
                    self._look()
                    log_worker(event)
                elif isinstance(event, ev.Received):
                    self.tally.received(event, now)
        finally:
            self._is_handling = False

    def _carry_out(self, command: ev.Command, now: float) -> None:
        match command:
            case ev.Deliver():
                track = self._tracks.get(command.request)
                if track is not None:
                    track.deliver(command)
            case ev.DeliverPrompt():
                track = self._tracks.get(command.request)
                if track is not None:
                    track.deliver_prompt(command)
            case ev.End():
                log_ended(self.tally.ended(command.request, command.status, now))
                self._end(command)
            case ev.Hang():
                log.warning("worker %s: %s", command.worker, command.reason)
                address = self._links.hang(command.worker, command.reason)
                if command.stuck:
                    self.tell_stuck(command.worker, address, command.reason)
            case _:
                if isinstance(command, ev.Send):
                    self.tally.sent(command, now)
                elif isinstance(command, ev.Submit):
                    self.tally.submitted(command, now)
                    log_placed(command)
                self._links.send(command)

    def _end(self, end: ev.End) -> None:
        track = self._tracks.pop(end.request, None)
        if track is None:
            return
        code = CODES.get(end.status)
        error = None
        if code is not None:
            error = ServingError(code, presentable(end.message), None, end.retry_after)
        track.answers.ended(end.request, error)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self.tell(ev.Tick())
            except Exception:  # a mistake in deciding must not stop the clock
                log.exception("a tick failed")

    # ------------------------------------------------------------ workers

    async def set_workers(self, addresses: Mapping[str, str]) -> None:
        """Keep streams to exactly these workers, given as name: host:port."""
        await self._links.set(addresses)

    async def assign(self, worker: str, role: str) -> None:
        """Give a worker a role, and whoever follows it under its name. What it runs goes on.

        Returns once the supervisor holds the role, if there is one. Raises INVALID for what is no
        role, NOT_FOUND for a worker that is not wanted here, UNAVAILABLE if the supervisor does
        not confirm the role.
        """
        if role not in ROLES:
            raise invalid(f"there is no role {role[:80]!r}: give {', '.join(ROLES)}", "role")
        names = sorted(link.worker for link in self._links.wanted())
        if worker not in names:
            raise ServingError(
                Code.NOT_FOUND,
                f"there is no worker {worker[:80]!r}; there are {', '.join(names) or 'none'}",
                "worker",
            )
        await self.roles.record(worker, role)

    def set_roles(self, assignments: Assignments) -> None:
        """What operators said, here or to another router; the last word on a worker counts."""
        self.roles.hold(assignments)

    def worker_died(self, name: str) -> None:
        """Somebody who knows says that it is dead: do not wait for its silence."""
        self._links.hang(name, "it died")

    # ------------------------------------------------------------ the end

    async def drain(self, seconds: float) -> None:
        """Take nothing new, and give what runs so many seconds to end by itself."""
        self.is_draining = True
        self._look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._tracks:
                    await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End everything: open calls get an error, streams to workers close."""
        self.is_draining = True
        self._look()
        error = ServingError(Code.UNAVAILABLE, "the server is shutting down", retry_after=1.0)
        for track in list(self._tracks.values()):
            track.answers.fail(error)
        await self._links.set({})
        self._clock.cancel()
        self.text.close()
