"""Runs one fault schedule with its routers, workers, clients and faults, on one virtual clock.

An invariant that does not hold raises `InvariantViolated`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from penstock.loadtests.simulator.faults.fault_injection import RESTART_SECONDS, FaultInjector
from penstock.loadtests.simulator.faults.index_check import check_index
from penstock.loadtests.simulator.faults.request_driver import RequestDriver
from penstock.loadtests.simulator.faults.schedules import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Fault,
    Schedule,
    WorkerPlan,
)
from penstock.loadtests.simulator.model.executors import TimedHashModel
from penstock.loadtests.simulator.world.clock import Clock
from penstock.loadtests.simulator.world.kv_transfer import transfer_endpoint
from penstock.loadtests.simulator.world.network import Network
from penstock.loadtests.simulator.world.rank_pairs import TransferTiming
from penstock.loadtests.simulator.world.router import Router
from penstock.loadtests.simulator.world.session import WorkerShape
from penstock.loadtests.simulator.world.worker import Worker
from penstock.router.routing import events as ev
from penstock.router.routing.dispatcher import DispatcherLimits as RouterLimits
from penstock.router.routing.placement.routing_strategies import policy_of
from penstock.router.routing.prefix_cache.cache_feed import MAX_RESYNC_SECONDS
from penstock.router.routing.worker_registry import LivenessBounds
from penstock.workers.kv_transfer.protocol.messages import WorkerId
from penstock.workers.scheduling.config import SchedulerConfig

END_WITHIN_SECONDS = 150.0
"""Seconds after the last fault within which every request must have ended."""
REST_SECONDS = 15.0
"""Seconds after the last request's end until all resources must be released."""
WAIT_WITHOUT_WORKERS = 20.0
STUCK_SECONDS = 8.0  # longer than the timeout of a KV transfer (see `RouterConfig.stuck_seconds`)
BLOCK_BYTES = 1 << 20
HASH_KEY = bytes(range(32))

Log = Callable[[str], None]


class InvariantViolated(Exception):
    """Raised if an invariant does not hold. The message names the invariant."""


@dataclass(slots=True)
class RunCounts:
    """Counts of events in one schedule, or their sums over several schedules."""

    requests: int = 0
    tokens: int = 0
    constrained: int = 0  # number of complete answers of constrained requests
    kv_transfers: int = 0
    failovers: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, other: "RunCounts") -> None:
        self.requests += other.requests
        self.tokens += other.tokens
        self.constrained += other.constrained
        self.kv_transfers += other.kv_transfers
        self.failovers += other.failovers
        self.ends += other.ends
        self.faults += other.faults


class ScheduleRun:
    """Holds the routers, workers, clients and faults of one schedule.

    Args:
        log: called with one line of text per event.
        fast_forwards: whether consecutive steps in which no request arrives or ends are combined
            into one event. Times then change, but the invariants are still checked.
    """

    def __init__(
        self, schedule: Schedule, log: Log | None = None, fast_forwards: bool = False
    ) -> None:
        self.schedule = schedule
        self._fast_forwards = fast_forwards
        self.clock = Clock()
        self.network = Network(self.clock, schedule.latency, schedule.bandwidth)
        self.counts = RunCounts(requests=len(schedule.requests))
        self._log = log
        self._num_started = 0
        self._names = [plan.name for plan in schedule.workers]
        self._plans = {plan.name: plan for plan in schedule.workers}
        self._workers: dict[str, Worker] = {}
        self._by_name: dict[WorkerId, Worker] = {}
        self._routers: list[Router] = []
        self._requests = RequestDriver(self.clock, self._routers, self.note)
        self._injector = FaultInjector(self.clock, self.network, self._workers, self._start_worker)
        self._roles: dict[str, str] = {}  # roles that `role` faults assigned, by worker name
        for plan in schedule.workers:
            self._start_worker(plan.name)
        for number in range(schedule.num_routers):
            self._routers.append(self._start_router(number))
        for request in schedule.requests:
            self._requests.plan(request)
        for fault in schedule.faults:
            self._plan_fault(fault)

    def play(self) -> RunCounts:
        """Run the schedule to its end and return its counts. Raises InvariantViolated."""
        try:
            self._play()
        except InvariantViolated:
            raise
        except Exception as error:
            what, where = type(error).__name__, _innermost(error)
            raise InvariantViolated(
                f"{what} at {self.clock.now:.3f} s: {error} ({where})"
            ) from error
        return self.counts

    def _play(self) -> None:
        last = [0.0, *(one.at + one.seconds for one in self.schedule.faults)]
        last += [one.at for one in self.schedule.requests]
        bound = max(last) + END_WITHIN_SECONDS
        while late := self._requests.running():
            if self.clock.next > bound:
                raise InvariantViolated(
                    f"requests {late} have not ended {END_WITHIN_SECONDS:g} s (simulated) after "
                    "the last event of the schedule"
                )
            self.clock.step()
        self.clock.run(max(self.clock.now, *last) + REST_SECONDS)
        self._run_until_caches_are_known()
        self._check_rest()

    def _run_until_caches_are_known(self) -> None:
        """Run until routers have the snapshots that they need; their requests may have to wait."""
        for worker in self._workers.values():
            worker.cache_stream.reveal_omissions()
        self.clock.run(self.clock.now + 1.0)
        bound = self.clock.now + 2 * MAX_RESYNC_SECONDS
        while self.clock.now < bound and not all(
            router.dispatcher.cache_feed.is_current(worker.info.worker)
            for router, worker in self._live_pairs()
        ):
            self.clock.run(self.clock.now + 1.0)

    def _live_pairs(self) -> list[tuple[Router, Worker]]:
        return [
            (router, worker)
            for router in self._routers
            for worker in self._workers.values()
            if router.process.alive and worker.process.alive
        ]

    def _check_rest(self) -> None:
        for client in self._requests.clients:
            client.check(undisturbed=not self.schedule.faults)
            self.counts.ends[client.how] += 1
            self.counts.tokens += client.num_tokens
            self.counts.constrained += client.num_constrained
        for worker in self._workers.values():
            if worker.process.alive:
                worker.check_rest()
        for router in self._routers:
            if router.process.alive:
                dispatcher = router.dispatcher
                assert dispatcher.num_requests == 0, (
                    "a router still holds requests, although all requests have ended"
                )
                assert not any(one.num_requests for one in dispatcher.workers()), (
                    "a router still counts requests at a worker, although all requests have ended"
                )
                self._count(router)
        for router, worker in self._live_pairs():
            check_index(router, worker)

    def _count(self, router: Router) -> None:
        counters = router.dispatcher.counters
        self.counts.kv_transfers += counters.num_transfers
        self.counts.failovers += counters.num_failovers

    def note(self, text: str) -> None:
        if self._log is not None:
            self._log(f"{self.clock.now:.6f} {text}")

    # ------------------------------------------------------------ workers and routers

    def _start_worker(self, name: str) -> None:
        self._num_started += 1
        plan, incarnation = self._plans[name], str(self._num_started)
        executor = TimedHashModel(
            plan.num_blocks,
            BLOCK_SIZE,
            plan.max_sequences,
            plan.step_seconds,
            plan.token_seconds,
            plan.max_forced,
        )
        shape = _worker_shape(plan, incarnation, self.schedule)
        worker = Worker(shape, executor, self.network, self._find, 4, self._fast_forwards)
        worker.reports_step_seconds = self.schedule.reports_step_seconds
        self._workers[name] = self._by_name[name, incarnation] = worker
        self.note(f"{name} starts")

    def _find(self, name: WorkerId) -> Worker | None:
        worker = self._by_name.get(name)
        return worker if worker is not None and worker.process.alive else None

    def _live(self, name: str) -> Worker | None:
        worker = self._workers[name]
        return worker if worker.process.alive else None

    def _start_router(self, number: int) -> Router:
        limits = RouterLimits(
            max_queued=self.schedule.max_queued,
            ttft_slo_seconds=self.schedule.ttft_slo_seconds,
            tpot_slo_seconds=self.schedule.tpot_slo_seconds,
            no_worker_timeout_seconds=WAIT_WITHOUT_WORKERS,
            bounds=LivenessBounds(stuck_after=STUCK_SECONDS),
        )
        router = Router(
            f"r{number}",
            self.network,
            policy_of("cost"),
            limits,
            self._live,
            self._on_event,
            check=True,
            hash_key=HASH_KEY,
        )
        for name in self._names:
            router.link(name)
        for name, role in self._roles.items():
            router.assign(name, role)
        self.note(f"r{number} starts")
        return router

    def _on_event(self, router: str, event: ev.Event, commands: list[ev.Command]) -> None:
        if isinstance(event, ev.Ready):
            self._requests.on_moved(router, event.request)
        for command in commands:
            if isinstance(command, ev.CloseStream) and command.stuck:
                self._on_given_up(self._by_name[command.worker, command.incarnation])
        if self._log is None:
            return
        if commands or not isinstance(event, ev.Tick | ev.Heartbeat):
            self.note(f"{router} {event}")
            for command in commands:
                self.note(f"{router}   {command}")

    # ------------------------------------------------------------ faults

    def _plan_fault(self, fault: Fault) -> None:
        self.clock.at(fault.at, lambda: self._inject(fault))

    def _inject(self, fault: Fault) -> None:
        self.counts.faults[fault.kind] += 1
        self.note(str(fault))
        until = self.clock.now + fault.seconds
        name = self._names[min(fault.one, len(self._names) - 1)]
        worker, injector = self._workers[name], self._injector
        match fault.kind.split():
            case ["kill"] | ["lose"] as how:
                injector.kill(worker, seen=how == ["kill"])
            case ["hang"]:
                process = worker.process
                process.stop()
                self.clock.at(until, process.go_on)
            case ["slow"]:
                injector.slow(worker, 1 + 10 * fault.size, until)
            case ["stuck"]:
                injector.make_stuck(worker, until)
            case ["drain"]:
                injector.drain(worker)
            case ["role", role]:
                self._assign(name, role)
            case ["kill", "router"]:
                self._kill_router(fault.one)
            case ["hang", "router"]:
                process = self._routers[fault.one].process
                process.stop()
                self.clock.at(until, process.go_on)
            case [_, "stream" | "blocks" | "events" as way]:
                others = self._names if way == "blocks" else [one.name for one in self._routers]
                injector.disturb(name, others[fault.other], fault, until)

    def _on_given_up(self, worker: Worker) -> None:
        """Replace a worker that a router reported as stuck, and check that it really was stuck."""
        if worker.process.alive and worker.executor.slowness < inf:
            raise InvariantViolated(
                f"a router reported worker {worker.info.worker} as stuck, but the worker was "
                "making progress"
            )
        self.clock.after(0.0, lambda: self._injector.kill(worker, seen=True))

    def _assign(self, name: str, role: str) -> None:
        """Assign a role at all routers, as an operator does.

        Routers that start later also get the role.
        """
        self._roles[name] = role
        for router in self._routers:
            if router.process.alive:
                router.assign(name, role)

    def _kill_router(self, number: int) -> None:
        router = self._routers[number]
        if not router.process.alive:
            return
        router.process.kill()
        self._count(router)
        router.close_links()
        self._requests.on_router_killed(router)

        def restart() -> None:
            self._routers[number] = self._start_router(number)

        self.clock.after(RESTART_SECONDS, restart)


def _worker_shape(plan: WorkerPlan, incarnation: str, schedule: Schedule) -> WorkerShape:
    info = ev.WorkerInfo(
        worker=plan.name,
        incarnation=incarnation,
        role=plan.role,
        layout=plan.layout,
        block_size=BLOCK_SIZE,
        num_blocks=plan.num_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_sequences=plan.max_sequences,
        machine="m" if schedule.same_machine else "",
        transfer=transfer_endpoint(plan.name, incarnation),
    )
    limits = SchedulerConfig(
        num_blocks=plan.num_blocks,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        max_sequences=plan.max_sequences,
        max_batched_tokens=max(plan.max_batched_tokens, plan.max_sequences),
        max_queued=plan.max_queued,
        hash_key=HASH_KEY,
        forced_per_other_row=plan.forced_per_other_row,
        tpot_slo_seconds=schedule.tpot_slo_seconds,
    )
    pace = TransferTiming(write=plan.write_seconds, message_bytes=plan.message_blocks * BLOCK_BYTES)
    return WorkerShape(info, limits, BLOCK_BYTES, pace)


def _innermost(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "somewhere"
    code = trace.tb_frame.f_code
    return f"{code.co_name}, {code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}"
