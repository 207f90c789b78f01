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

from penstock.workers.engine import Engine, Launched, StepResult
from penstock.workers.sampler import Sampled
from penstock.workers.scheduling.sequence import StepPlan


@dataclass(frozen=True, slots=True)
class _Computed:
    plan: StepPlan
    sampled: Sampled
    seconds: float


class OneByOne:
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

    def look_ahead(self) -> None:
        """Nothing computes now that could be planned behind."""

    def stop(self) -> None:
        """Nothing computes."""


def steps_of(engine: Engine, changed: threading.Condition) -> "OneByOne | Pipeline":
    """As the engine was told, on the device that it has."""
    if not engine.plans_ahead:
        return OneByOne(engine)
    return DevicePipeline(engine, changed) if engine.on_device else Pipeline(engine, changed)


class Pipeline:
    """Runs an engine's steps. All methods are the engine's thread's; none waits for the device.

    `changed` is notified when a step has been computed.
    """

    def __init__(self, engine: Engine, changed: threading.Condition) -> None:
        self._engine = engine
        self._changed = changed
        self._given: deque[StepPlan] = deque()  # not begun
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
        return self._num_unbooked() > 0

    def advance(self, commanded: bool) -> StepResult:
        """Book what has been computed and see to it that something computes.

        `commanded`: something was asked of the engine since the last call, so that the next step
        may be another than the one planned.
        """
        if self._error is not None:
            raise self._error
        if commanded:
            self._take_back()
        result = StepResult()
        self._engine.note(result)
        if self._computed:
            done = self._computed[0]
            self._engine.book(done.plan, done.sampled, done.seconds, result)
            with self._changed:
                self._computed.popleft()
                self._changed.notify_all()
        if not self.busy:
            self._give(self._engine.plan(result))
        return result

    def look_ahead(self) -> None:
        """Plan the step behind the one that computes, if that can be known already."""
        if self._num_unbooked() == 1:
            self._give(self._engine.plan_ahead())

    def stop(self) -> None:
        """End after the step that computes, and wait for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _num_unbooked(self) -> int:
        with self._changed:
            return len(self._given) + (self._computing is not None) + len(self._computed)

    def _give(self, plan: StepPlan | None) -> None:
        if plan is not None:
            with self._changed:
                if plan.ahead and self._computed:  # it was computed meanwhile
                    plan.fill(self._computed[-1].sampled.tokens)
                self._given.append(plan)
                self._changed.notify_all()

    def _take_back(self) -> None:
        """Whatever has not begun, newest first, but what makes copies that are counted on."""
        plans = []
        with self._changed:
            while self._given and not len(self._given[-1].copies):
                plans.append(self._given.pop())
        for plan in plans:
            self._engine.batcher.withdraw(plan)

    # ------------------------------------------------------------ the computing thread

    def _run(self) -> None:
        try:
            while (plan := self._next()) is not None:
                began = time.perf_counter()
                logits = self._engine.compute(plan)
                self._wait_until_booked()
                sampled = self._engine.draw(plan, logits)
                with self._changed:
                    if self._given:
                        self._given[0].fill(sampled.tokens)
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
            self._changed.wait_for(lambda: self._given or self._stopping)
            if self._stopping:
                return None
            self._computing = self._given.popleft()
            return self._computing

    def _wait_until_booked(self) -> None:
        """The step before has to be in the history."""
        with self._changed:
            self._changed.wait_for(lambda: not self._computed or self._stopping)


class DevicePipeline(Pipeline):
    """The same where the engine's thread launches steps and does not compute them."""

    def __init__(self, engine: Engine, changed: threading.Condition) -> None:
        self._launched: deque[Launched] = deque()  # tokens not arrived
        self._newest: Launched | None = None
        super().__init__(engine, changed)

    def look_ahead(self) -> None:
        """As of `Pipeline`; but what is drawn on the host has to be there first."""
        if self._newest is not None and self._newest.tokens is not None:
            super().look_ahead()

    def _num_unbooked(self) -> int:
        with self._changed:
            return len(self._launched) + len(self._computed)

    def _give(self, plan: StepPlan | None) -> None:
        if plan is not None:
            self._newest = self._engine.launch(plan, self._newest)
            with self._changed:
                self._launched.append(self._newest)
                self._changed.notify_all()

    def _take_back(self) -> None:
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

    def _oldest(self) -> Launched | None:
        with self._changed:
            self._changed.wait_for(lambda: self._launched or self._stopping)
            return None if self._stopping else self._launched[0]
