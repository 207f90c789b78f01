"""How the engine's thread runs steps: one by one, or the next planned while one computes.

In a pipeline there are two threads. The computing one runs the model and draws; the engine's own
plans, books, and applies commands. A step planned ahead begins as soon as the one before it has
drawn its tokens, whatever the engine's thread does then; it draws its own once that one is booked,
since penalties and the like read the answer so far.

A GPU computes by itself. There the engine's thread launches too: a step planned ahead goes to the
device behind the one that computes, and finds that one's tokens there. The second thread only waits
for tokens to arrive.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass

from penstock.workers.engine.engine import Engine, LaunchedStep, StepResult
from penstock.workers.sampling.sampler import Sampled
from penstock.workers.scheduling.sequence import StepPlan


@dataclass(frozen=True, slots=True)
class _Computed:
    plan: StepPlan
    sampled: Sampled
    seconds: float


class SyncStepper:
    """Computes each step where it is asked for."""

    busy = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.due = False  # whether the last step may be followed by another

    def advance(self, commanded: bool) -> StepResult:
        """One step, if there is anything to compute."""
        result = self._engine.step()
        self.due = result.output is not None
        return result

    def plan_next(self) -> None:
        """Nothing computes now that could be planned behind."""

    def stop(self) -> None:
        """Nothing computes."""


def make_stepper(engine: Engine, changed: threading.Condition) -> "SyncStepper | OverlapStepper":
    """As the engine was told, on the device that it has."""
    if not engine.plans_ahead:
        return SyncStepper(engine)
    return DeviceStepper(engine, changed) if engine.on_device else OverlapStepper(engine, changed)


class OverlapStepper:
    """Runs an engine's steps. All methods are the engine's thread's; none waits for the device.

    `changed` is notified when a step has been computed.
    """

    def __init__(self, engine: Engine, changed: threading.Condition) -> None:
        self._engine = engine
        self._changed = changed
        self._pending: deque[StepPlan] = deque()  # not begun
        self._computing: StepPlan | None = None
        self._computed: deque[_Computed] = deque()  # not booked
        self._error: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    @property
    def due(self) -> bool:
        """Whether `advance` has something to do. Under `changed`."""
        return bool(self._computed) or self._error is not None

    @property
    def busy(self) -> bool:
        """Whether a step computes or will, without another command."""
        return self._num_uncommitted() > 0

    def advance(self, commanded: bool) -> StepResult:
        """Book what has been computed and see to it that something computes.

        `commanded`: something was asked of the engine since the last call, so that the next step
        may be another than the one planned.
        """
        if self._error is not None:
            raise self._error
        if commanded:
            self._withdraw_pending()
        result = StepResult()
        self._engine.drain_events(result)
        if self._computed:
            done = self._computed[0]
            self._engine.commit(done.plan, done.sampled, done.seconds, result)
            with self._changed:
                self._computed.popleft()
                self._changed.notify_all()
        if not self.busy:
            self._enqueue(self._engine.plan(result))
        return result

    def plan_next(self) -> None:
        """Plan the step behind the one that computes, if that can be known already."""
        if self._num_uncommitted() == 1:
            self._enqueue(self._engine.plan_ahead())

    def stop(self) -> None:
        """End after the step that computes, and wait for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _num_uncommitted(self) -> int:
        with self._changed:
            return len(self._pending) + (self._computing is not None) + len(self._computed)

    def _enqueue(self, plan: StepPlan | None) -> None:
        if plan is not None:
            with self._changed:
                if plan.ahead and self._computed:  # it was computed meanwhile
                    plan.fill(self._computed[-1].sampled.tokens)
                self._pending.append(plan)
                self._changed.notify_all()

    def _withdraw_pending(self) -> None:
        """Whatever has not begun, newest first, but what makes copies that are counted on."""
        plans = []
        with self._changed:
            while self._pending and not len(self._pending[-1].copies):
                plans.append(self._pending.pop())
        for plan in plans:
            self._engine.batcher.withdraw(plan)

    # ------------------------------------------------------------ the computing thread

    def _run(self) -> None:
        try:
            while (plan := self._next()) is not None:
                began = time.perf_counter()
                logits = self._engine.compute(plan)
                self._wait_until_committed()
                sampled = self._engine.sample(plan, logits)
                with self._changed:
                    if self._pending:
                        self._pending[0].fill(sampled.tokens)
                    self._computing = None
                    seconds = time.perf_counter() - began
                    self._computed.append(_Computed(plan, sampled, seconds))
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> StepPlan | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._stopping)
            if self._stopping:
                return None
            self._computing = self._pending.popleft()
            return self._computing

    def _wait_until_committed(self) -> None:
        """The step before has to be in the history."""
        with self._changed:
            self._changed.wait_for(lambda: not self._computed or self._stopping)


class DeviceStepper(OverlapStepper):
    """The same where the engine's thread launches steps and does not compute them."""

    def __init__(self, engine: Engine, changed: threading.Condition) -> None:
        self._launched: deque[LaunchedStep] = deque()  # tokens not arrived
        self._newest: LaunchedStep | None = None
        super().__init__(engine, changed)

    def plan_next(self) -> None:
        """As of `OverlapStepper`; but what is drawn on the host has to be there first."""
        if self._newest is not None and self._newest.tokens is not None:
            super().plan_next()

    def _num_uncommitted(self) -> int:
        with self._changed:
            return len(self._launched) + len(self._computed)

    def _enqueue(self, plan: StepPlan | None) -> None:
        if plan is not None:
            self._newest = self._engine.launch(plan, self._newest)
            with self._changed:
                self._launched.append(self._newest)
                self._changed.notify_all()

    def _withdraw_pending(self) -> None:
        """What is launched runs."""

    def _run(self) -> None:
        arrived = time.perf_counter()
        try:
            while (step := self._oldest()) is not None:
                sampled = step.wait()
                began, arrived = max(step.began, arrived), time.perf_counter()
                with self._changed:
                    self._launched.popleft()
                    self._computed.append(_Computed(step.plan, sampled, arrived - began))
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _oldest(self) -> LaunchedStep | None:
        with self._changed:
            self._changed.wait_for(lambda: self._launched or self._stopping)
            return None if self._stopping else self._launched[0]
