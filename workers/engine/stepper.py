"""Running the engine's steps: one at a time, or planning the next one while one computes.

Overlap needs a second thread, which runs the model and samples, while the engine's thread plans,
commits and applies commands. A step planned ahead begins as soon as the step before has drawn its
tokens, without waiting for the engine's thread. It samples only once that step is committed, since
penalties and similar settings read the answer so far.

A GPU computes asynchronously. There the engine's thread also launches the steps: one planned ahead
is queued on the device behind the running one and reads that one's tokens on the device. The second
thread only waits for tokens to arrive.
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
    """Stepper that runs each step from begin to end within `advance`."""

    busy = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.due = False  # whether another step may follow the last one

    def advance(self, commanded: bool) -> StepResult:
        """Run one step, if there is anything to compute."""
        result = self._engine.step()
        self.due = result.output is not None
        return result

    def plan_next(self) -> None:
        """Do nothing: there is no step in flight to plan behind."""

    def stop(self) -> None:
        """Do nothing: there is no second thread to end."""


def make_stepper(engine: Engine, changed: threading.Condition) -> "SyncStepper | OverlapStepper":
    """Return the stepper for the engine's configuration and device."""
    if not engine.plans_ahead:
        return SyncStepper(engine)
    return DeviceStepper(engine, changed) if engine.on_device else OverlapStepper(engine, changed)


class OverlapStepper:
    """Stepper that computes steps on a second thread.

    The methods are for the engine's thread; all but `stop` return without waiting for a step.
    `changed` is notified when a step has been computed.
    """

    def __init__(self, engine: Engine, changed: threading.Condition) -> None:
        self._engine = engine
        self._changed = changed
        self._pending: deque[StepPlan] = deque()  # planned, not begun
        self._computing: StepPlan | None = None
        self._computed: deque[_Computed] = deque()  # computed, not committed
        self._error: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    @property
    def due(self) -> bool:
        """True if a step is to be committed or has failed. Call with `changed` held."""
        return bool(self._computed) or self._error is not None

    @property
    def busy(self) -> bool:
        """True if a step computes, or will without another command, or is to be committed."""
        return self._num_uncommitted() > 0

    def advance(self, commanded: bool) -> StepResult:
        """Commit a computed step, and plan the next one if none is left to compute.

        Args:
            commanded: commands were applied since the last call, so the next step may differ from
                the one planned ahead, which is withdrawn.
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
        """Plan the step behind the one that computes, if it does not depend on its result."""
        if self._num_uncommitted() == 1:
            self._enqueue(self._engine.plan_ahead())

    def stop(self) -> None:
        """End the second thread after the step that computes, and wait for it."""
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
                if plan.ahead and self._computed:  # the step before was computed meanwhile
                    plan.fill(self._computed[-1].sampled.tokens)
                self._pending.append(plan)
                self._changed.notify_all()

    def _withdraw_pending(self) -> None:
        """Withdraw steps that have not begun, newest first, up to one that copies blocks."""
        plans = []
        with self._changed:
            while self._pending and not len(self._pending[-1].copies):
                plans.append(self._pending.pop())
        for plan in plans:
            self._engine.batcher.withdraw(plan)

    # ------------------------------------------------------------ second thread

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
        """Wait until the step before is committed: sampling reads the answers so far."""
        with self._changed:
            self._changed.wait_for(lambda: not self._computed or self._stopping)


class DeviceStepper(OverlapStepper):
    """Overlap stepper for a GPU: the engine's thread launches steps, the second one waits."""

    def __init__(self, engine: Engine, changed: threading.Condition) -> None:
        self._launched: deque[LaunchedStep] = deque()  # their tokens have not arrived
        self._newest: LaunchedStep | None = None
        super().__init__(engine, changed)

    def plan_next(self) -> None:
        """Plan as `OverlapStepper` does, unless the newest step's tokens are drawn on the host."""
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
        """Do nothing: a launched step cannot be withdrawn."""

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
