"""The protocol-independent part of a router: accepts requests and returns streams of deltas.

The frontend runs in one event loop and handles one event at a time. An event that is posted while
another event is being handled is queued until that handling ends.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from penstock.common.text.tokenizer import ModelTokenizer
from penstock.router.config import RouterConfig
from penstock.router.errors import Code, ServingError, shutting_down
from penstock.router.helpers.pool import HelperPool
from penstock.router.observability import snapshot
from penstock.router.observability.cluster_load import ClusterLoadMeter
from penstock.router.observability.event_log import log_worker
from penstock.router.observability.explanations import Explanations
from penstock.router.observability.history import History
from penstock.router.observability.readiness import Readiness, ReadinessListeners
from penstock.router.observability.request_metrics import RequestMetrics
from penstock.router.observability.role_recorder import RoleRecorder
from penstock.router.requests.admission import RequestAdmission
from penstock.router.requests.background_tasks import BackgroundTasks
from penstock.router.requests.call_once import CallOnce
from penstock.router.requests.canceller import RequestCanceller
from penstock.router.requests.generation_defaults import GenerationDefaults
from penstock.router.requests.open_requests import OpenRequests
from penstock.router.requests.prompt_encoder import PromptEncoder
from penstock.router.requests.prompt_hasher import PromptHasher
from penstock.router.requests.request import GenerationRequest, ModelLimits
from penstock.router.requests.response_stream import ResponseStream
from penstock.router.requests.slices import Slices
from penstock.router.routing import events as ev
from penstock.router.routing.dispatcher import Dispatcher, WorkerStatus
from penstock.router.worker_links.links import WorkerLinks
from penstock.router.worker_links.worker_link import RouterIdentity

log = logging.getLogger(__name__)

TICK_SECONDS = 0.1

READINESS_EVENTS = (ev.WorkerUp, ev.WorkerLost, ev.RoleChanged, ev.Tick)
"""Events that can change whether the router is ready."""
DRAINING = "the router is draining"


class Frontend:
    """Connects the calls of clients with the dispatcher, and the dispatcher with the worker links.

    Args:
        config: configuration of the router.
        tokenizer: tokenizer and chat template of the model.
        limits: limits from the model's own configuration.
        dispatcher: decides which commands follow from each event.
        incarnation: random id, new at each start of the router.
        tenants: name of each tenant in metrics; does not reveal the API key.
        defaults: the model's own defaults of sampling parameters.
        helpers: the processes that parse large bodies and render chats; closed by `stop`.
    """

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: ModelTokenizer,
        limits: ModelLimits,
        dispatcher: Dispatcher,
        incarnation: str,
        tenants: Mapping[str, str],
        defaults: GenerationDefaults,
        helpers: HelperPool,
    ) -> None:
        self.config, self.defaults = config, defaults
        self.tokenizer, self.helpers = tokenizer, helpers
        self.prompts = PromptEncoder(tokenizer, config, lambda: self.model, helpers)
        self.metrics = RequestMetrics(tenants)
        self.is_draining = self.is_stopped = self.is_paused = False
        self.scaling = snapshot.Scaling()  # the supervisor's last report about scaling
        self.roles = RoleRecorder(lambda worker, role: self.post(ev.RoleChanged(worker, role)))
        self.routers: Sequence[snapshot.RouterState] = ()  # as reported by the supervisor
        self.node = ""  # IP address of the router's node, or empty if unknown
        # Callback for a stuck worker; arguments: the worker's name, its address and the reason.
        self.on_stuck_worker: Callable[[str, str, str], None] = lambda worker, address, reason: None
        self._limits, self._dispatcher = limits, dispatcher
        identity = RouterIdentity(config.name, incarnation, config.worker_token)
        self._links = WorkerLinks(identity, self.post)
        self.step_records = self._links.step_records
        self.cluster_load = ClusterLoadMeter(self._links.all_links, lambda: dispatcher.num_queued)
        self.explanations = Explanations(tenants, config.routing)
        dispatcher.listen(self.explanations)
        self.background = BackgroundTasks()
        self._requests = OpenRequests(self.metrics, self.explanations)
        self._canceller = RequestCanceller(self._cancel)
        hasher = PromptHasher(config.hash_key, self._links.block_sizes, self.prompts.run_in_line)
        self._admission = RequestAdmission(config, tokenizer, self.post, hasher, helpers)
        self._events: deque[ev.Event] = deque()
        self._is_handling = False
        self._assign_soon = CallOnce(lambda: self.post(ev.AssignWaiting()))
        self._readiness = Readiness(config.waits_for_both, config.wakes_workers)
        self._loop = asyncio.get_running_loop()
        self.history = History(self.metrics, self._loop.time())
        self._readiness_listeners = ReadinessListeners(self.why_not_ready())
        self._clock = asyncio.create_task(self._tick(), name="router clock")

    # ------------------------------------------------------------ the model and its state

    @property
    def model(self) -> ModelLimits:
        """Limits for requests: the smallest of the model's and the connected workers' limits."""
        return self._links.model_limits(self._limits)

    @property
    def system_fingerprint(self) -> str | None:
        """Value of OpenAI's field `system_fingerprint`; None while no worker is connected."""
        return self._links.system_fingerprint()

    def check_model(self, name: str | None) -> None:
        """Raise NOT_FOUND if `name` is given and is not a name of the served model."""
        if name and name not in self.config.model_names:
            raise ServingError(
                Code.NOT_FOUND,
                f"the model {name[:80]!r} does not exist: this server serves {self._limits.name!r}",
                "model",
            )

    def why_not_ready(self) -> str:
        """Return why requests cannot be served now, or an empty string if they can."""
        if self.is_draining or self.is_paused:
            return DRAINING
        roles = self._dispatcher.ready_roles
        return self._readiness.not_ready_reason(roles, self.num_workers, self._loop.time())

    @property
    def num_workers(self) -> int:
        """Number of workers with an open stream."""
        return len(self._links)

    def workers(self) -> Sequence[WorkerStatus]:
        """Return the status of all workers with an open stream."""
        return self._dispatcher.workers()

    @property
    def num_open_requests(self) -> int:
        """Number of requests that have not ended, including those that are being checked."""
        return len(self._requests) + self._admission.num_pending

    def take_snapshot(self) -> snapshot.ClusterState:
        """Return the current state of the router and its workers."""
        why_not = self.why_not_ready()
        own = "draining" if why_not == DRAINING else "waiting" if why_not else "ready"
        return snapshot.snapshot_cluster(
            snapshot.RouterState(self.config.name, own, node=self.node),
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
        """Call `listener` with the result of `why_not_ready`, now and after each change of it."""
        self._readiness_listeners.add(listener)

    # ------------------------------------------------------------ client calls

    async def submit(self, requests: Sequence[GenerationRequest]) -> ResponseStream:
        """Check all requests of a call, then submit them together.

        Returns:
            The stream of answers; the caller must always close it.

        Raises:
            ServingError: a request is refused; no request of the call is submitted.
        """
        if self.is_draining or self.is_paused:
            raise shutting_down()
        answers = ResponseStream(self.config.bounds.max_unread_tokens, self._canceller.cancel)
        now = self._loop.time()
        admitted = await self._admission.admit_call(requests, answers, self.model, now)
        if self.is_stopped:
            raise shutting_down()
        # All checks have passed, so below only the queue can still refuse a request.
        slices = Slices()
        try:
            for request, output in admitted:
                if answers.has_failed:  # the queue has refused an earlier request of this call
                    break
                self._requests.open(request, output, now)
                output.deliver_finished_before()
                self.post(ev.RequestArrived(request))
                self.metrics.accepted(request.id)  # does nothing if the queue refused it
                await slices.pause()
        except BaseException:
            answers.close()
            raise
        return answers

    def _cancel(self, request: int) -> None:
        if self._requests.cancel(request, self._loop.time()):
            self.post(ev.ClientDisconnected(request))

    # ------------------------------------------------------------ events and commands

    def post(self, event: ev.Event) -> None:
        """Handle an event now or, if another event is being handled, directly after that one."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                event = self._events.popleft()
                now = self._loop.time()
                self._requests.observe(event, now)
                commands = self._dispatcher.handle(event, now)
                for command in commands:
                    self._execute(command, now)
                if isinstance(event, READINESS_EVENTS):
                    self._readiness_listeners.report(self.why_not_ready())
                    log_worker(event)
            if self._dispatcher.has_more_to_assign:
                self._assign_soon.schedule()
        finally:
            self._is_handling = False

    def _execute(self, command: ev.Command, now: float) -> None:
        match command:
            case ev.Deliver():
                self._requests.deliver(command.tokens, now)
            case ev.DeliverEnd():
                self._requests.deliver_end(command)
            case ev.DeliverPrompt():
                self._requests.deliver_prompt(command)
            case ev.EndRequest():
                self._requests.end(command, now)
            case ev.CloseStream():
                log.warning("closing the stream to worker %s: %s", command.worker, command.reason)
                address = self._links.close(command.worker, command.reason)
                if command.stuck:
                    self.on_stuck_worker(command.worker, address, command.reason)
            case _:
                self._requests.record(command, now)
                self._links.send(command)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self.post(ev.Tick())
                self.history.update(self._loop.time())
            except Exception:  # an error in the dispatcher must not stop the periodic ticks
                log.exception("handling a Tick event failed")

    # ------------------------------------------------------------ workers

    async def set_workers(self, addresses: Mapping[str, str]) -> None:
        """Connect to exactly the workers in `addresses` (name to `host:port`)."""
        await self._links.set_workers(addresses)

    async def assign(self, worker: str, role: str, by: str) -> None:
        """Assign a role to a worker and to later workers of the same name; `by` names the caller.

        The call returns once the supervisor, if there is one, has recorded the role.

        Raises:
            ServingError: INVALID for an unknown role, NOT_FOUND for an unknown worker,
                UNAVAILABLE if the supervisor does not confirm the role.
        """
        await self.roles.assign(worker, role, [each.worker for each in self._links.all_links()], by)

    def worker_died(self, name: str) -> None:
        """Treat a worker as lost immediately, because its process is known to have exited."""
        self._links.close(name, "its process has exited")

    # ------------------------------------------------------------ shutdown

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait up to `seconds` for the running requests to end."""
        self.is_draining = True
        self._readiness_listeners.report(self.why_not_ready())
        await self.background.drain(lambda: self.num_open_requests > 0, seconds)

    async def stop(self) -> None:
        """End open calls with UNAVAILABLE and close the streams to all workers."""
        self.is_draining = self.is_stopped = True
        self._readiness_listeners.report(self.why_not_ready())
        self._requests.fail_all(shutting_down())
        await self.background.end()
        await self._links.set_workers({})
        self._clock.cancel()
        self.prompts.close()
        self.helpers.close()
