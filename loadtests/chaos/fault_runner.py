"""Injects planned faults into a cluster one after another, each in its planned situation."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence

from penstock.cluster.pools.managed_worker import ManagedWorker
from penstock.loadtests.chaos import fault_injection
from penstock.loadtests.chaos.cluster import POLL_SECONDS, Cluster, pids_of
from penstock.loadtests.chaos.faults import Fault, InjectedFault
from penstock.router.observability.snapshot import WorkerState

MOMENT_SECONDS = 4.0  # seconds of waiting after which a busy worker is accepted in any situation
REDUNDANCY_SECONDS = 60.0  # seconds of waiting after which an idle worker is accepted too
# Seconds after which a fault is skipped if no attempt took effect, for example because no worker
# has a connection to cut.
SEARCH_SECONDS = 20.0
AFTER_SECONDS = 0.25  # seconds between the previous fault and an "at once" fault
BACK_SECONDS = 3.0  # seconds for which a worker counts as "back" after it became ready


def _busy_with_prompt(state: WorkerState) -> bool:
    return state.role != "decode" and state.numbers is not None and state.numbers.load.running > 0


def _transferring(state: WorkerState) -> bool:
    blocks = {} if state.numbers is None else state.numbers.blocks
    return bool(blocks.get("leased") or blocks.get("reserved"))


def _decoding(state: WorkerState) -> bool:
    return state.role != "prefill" and state.numbers is not None and state.numbers.load.running > 0


def _busy(state: WorkerState) -> bool:
    return state.requests > 0


MOMENT_CHECKS: dict[str, Callable[[WorkerState], bool]] = {
    "prompt": _busy_with_prompt,
    "KV transfer": _transferring,
    "decoding": _decoding,
    "back": _busy,
    "any": _busy,
    "at once": _busy,
}


class FaultRunner:
    """Injects faults into a cluster.

    Args:
        cluster: the cluster under test.
        pause: seconds to wait after each fault before looking for the next target.
        print_line: called with a line of text for each fault.
    """

    def __init__(self, cluster: Cluster, pause: float, print_line: Callable[[str], None]) -> None:
        self.injected: list[InjectedFault] = []
        self.router_down: list[float] = []  # times at which the router was killed
        self._cluster = cluster
        self._pause = pause
        self._print_line = print_line
        # For each worker that was killed or stopped, the time of the fault. The entry is removed
        # when the worker continues or is replaced.
        self._stopped: dict[str, float] = {}
        self._resuming: set[asyncio.Task[None]] = set()

    async def run(self, plan: Sequence[Fault], seconds: float) -> None:
        """Inject the faults one by one; stop after `seconds`. Raises ClusterFailed."""
        deadline = time.monotonic() + seconds
        for fault in plan:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(AFTER_SECONDS if fault.moment == "at once" else self._pause)
            number = f"{fault.number + 1}/{len(plan)}: {fault.kind}"
            injection = await self._inject_when_possible(fault)
            if injection is None:
                self._print_line(f"{number}: skipped, no effect within {SEARCH_SECONDS:g} s")
                continue
            self.injected.append(injection)
            self._print_line(f"{number}, {injection.title} ({injection.moment})")
        if self._resuming:
            await asyncio.wait(self._resuming)

    async def _inject_when_possible(self, fault: Fault) -> InjectedFault | None:
        """Retry the fault until it takes effect. Return None if the time limit is reached."""
        if fault.kind == "kill router":
            return await self._kill_router(fault)
        deadline = time.monotonic() + SEARCH_SECONDS
        while time.monotonic() < deadline:
            worker, moment = await self._choose(fault)
            injection = self._inject(fault, worker, moment)
            if injection is not None:
                return injection
            await asyncio.sleep(POLL_SECONDS)
        return None

    # ------------------------------------------------------------ target and moment

    async def _choose(self, fault: Fault) -> tuple[ManagedWorker, str]:
        """Wait for a worker in the fault's planned situation. Return the worker and its situation.

        After MOMENT_SECONDS any busy worker is accepted, and after REDUNDANCY_SECONDS any worker.
        """
        began = time.monotonic()
        while True:
            self._cluster.check()
            there = self._candidates()
            states = await self._cluster.states()
            waited = time.monotonic() - began
            for moment, wait_seconds in ((fault.moment, 0.0), ("any", MOMENT_SECONDS)):
                fitting = [each for each in there if self._fits(each, states, moment)]
                if fitting and waited >= wait_seconds:
                    return fitting[int(fault.draw * len(fitting))], moment
            if there and waited > REDUNDANCY_SECONDS:
                return there[int(fault.draw * len(there))], "any"
            await asyncio.sleep(POLL_SECONDS if there else 0.1)

    def _fits(self, worker: ManagedWorker, states: dict[str, WorkerState], moment: str) -> bool:
        state = states.get(worker.name)
        if state is None or not state.up or not MOMENT_CHECKS[moment](state):
            return False
        return moment != "back" or self._is_back(worker.title)

    def _is_back(self, title: str) -> bool:
        """Return whether a worker was restarted and became ready less than BACK_SECONDS ago."""
        ready = self._cluster.ready_times(title)
        return len(ready) > 1 and time.time() - ready[-1] < BACK_SECONDS

    def _candidates(self) -> list[ManagedWorker]:
        """Return the serving workers that may get a fault.

        The last serving worker of a pool is excluded if the pool has several workers.
        """
        there = [each for each in self._cluster.serving if not self._is_stopped(each)]
        roles = [each.config.role for each in self._cluster.workers]
        return [
            worker
            for worker in there
            if roles.count(worker.config.role) == 1
            or sum(each.config.role == worker.config.role for each in there) > 1
        ]

    def _is_stopped(self, worker: ManagedWorker) -> bool:
        since = self._stopped.get(worker.name)
        if since is None:
            return False
        replaced = any(
            event.title == worker.title and event.at > since for event in self._cluster.events
        )
        if replaced:
            del self._stopped[worker.name]
        return not replaced

    # ------------------------------------------------------------ injection

    def _inject(self, fault: Fault, worker: ManagedWorker, moment: str) -> InjectedFault | None:
        pids = pids_of(worker)
        rank = int(fault.draw * 7919) % len(pids)
        now = time.time()
        done, until = True, now
        match fault.kind:
            case "kill":
                done = fault_injection.send_signal(pids[rank], signal.SIGKILL)
            case "ray kill":
                assert worker.rank_group is not None
                worker.rank_group.ranks[rank].kill_by_ray()
            case "freeze":
                done = fault_injection.send_signal(pids[rank], signal.SIGSTOP)
            case "pause":
                done = fault_injection.send_signal(pids[rank], signal.SIGSTOP)
                until = now + fault.seconds
                self._resume_later(worker.name, pids[rank], fault.seconds)
            case "cut stream":
                router = self._cluster.router_pid
                done = router is not None and fault_injection.cut_connections(pids[0], [router]) > 0
            case "cut blocks":
                others = [each for each in self._cluster.serving if each is not worker]
                done = (
                    fault_injection.cut_connections(
                        pids[0], [pid for each in others for pid in pids_of(each)]
                    )
                    > 0
                )
        if not done:
            return None
        if fault.kind not in ("cut stream", "cut blocks"):
            self._stopped[worker.name] = now
        return InjectedFault(fault, moment, worker.name, worker.title, pids[rank], now, until)

    def _resume_later(self, name: str, pid: int, seconds: float) -> None:
        async def resume() -> None:
            await asyncio.sleep(seconds)
            fault_injection.send_signal(pid, signal.SIGCONT)
            self._stopped.pop(name, None)

        task = asyncio.create_task(resume())
        self._resuming.add(task)
        task.add_done_callback(self._resuming.discard)

    async def _kill_router(self, fault: Fault) -> InjectedFault:
        while (pid := self._cluster.router_pid) is None or not await self._cluster.snapshot():
            self._cluster.check()
            await asyncio.sleep(0.1)
        now = time.time()
        fault_injection.send_signal(pid, signal.SIGKILL)
        self.router_down.append(now)
        return InjectedFault(fault, "any", "", "router 0", pid, now, now)
