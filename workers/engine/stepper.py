"""Runs the engine's steps, one at a time or with overlap.

With overlap, a second thread runs the model and samples, while the engine's thread plans, commits
and applies commands. A step planned ahead starts as soon as the tokens of the previous step have
been sampled, without waiting for the engine's thread. The planned step samples only after the
previous step has been committed, because penalties and similar settings read the answer so far.

On a GPU, which computes asynchronously, the engine's thread also launches the steps. A step planned
ahead is queued on the device after the running step and reads the tokens of the running step there.
The second thread only waits for tokens to arrive on the host.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass

from penstock.workers.engine.executor import Executor, LaunchedStep
from penstock.workers.engine.output_processor import OutputProcessor
from penstock.workers.engine.results import StepResult
from penstock.workers.sampling.sampler import Sampled
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.sequence import StepPlan


@dataclass(frozen=True, slots=True)
class _Computed:
    plan: StepPlan
    sampled: Sampled
    seconds: float


class SyncStepper:
    """Stepper that runs each step from start to end within `advance`.

    With pipeline parallelism, one step per stage is in flight between calls of `advance`.
    """

    busy = False

    def __init__(self, batcher: Batcher, executor: Executor, outputs: OutputProcessor) -> None:
        self.due = False  # whether `advance` should be called again
        self._batcher = batcher
        self._executor = executor
        self._outputs = outputs
        self._in_flight: deque[StepPlan] = deque()  # steps that were broadcast, but not committed

    def advance(self, commanded: bool = False) -> StepResult:
        """Plan, execute and commit one step, if there is anything to compute."""
        batcher, in_flight, result = self._batcher, self._in_flight, StepResult()
        started = time.perf_counter()
        # Keep one step in flight per pipeline stage, so that no stage is idle.
        while len(in_flight) < batcher.limits.num_stages and (plan := batcher.plan()):
            self._executor.broadcast(plan)
            in_flight.append(plan)
        self._outputs.drain_events(result)
        if in_flight:
            sampled = self._executor.execute(in_flight[0], batcher.table)
            seconds = time.perf_counter() - started
            self._outputs.commit(in_flight.popleft(), sampled, seconds, result)
        self.due = result.output is not None
        return result

    def plan_next(self) -> None:
        """Do nothing, because `advance` plans all steps."""

    def stop(self) -> None:
        """Do nothing, because there is no second thread."""


class OverlapStepper:
    """Stepper that runs the model on a second thread.

    Only the engine's thread may call the public methods. All methods except `stop` return without
    waiting for a step. `changed` is notified when a step has been computed.
    """

    def __init__(
        self,
        batcher: Batcher,
        executor: Executor,
        outputs: OutputProcessor,
        changed: threading.Condition,
    ) -> None:
        self._batcher = batcher
        self._executor = executor
        self._outputs = outputs
        self._changed = changed
        self._pending: deque[StepPlan] = deque()  # steps that are planned, but not started
        self._computing: StepPlan | None = None
        self._computed: deque[_Computed] = deque()  # steps that are computed, but not committed
        self._error: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    @property
    def due(self) -> bool:
        """True if a step can be committed or has failed. Call this while holding `changed`."""
        return bool(self._computed) or self._error is not None

    @property
    def busy(self) -> bool:
        """True if a step is pending, is running, or has been computed but not committed."""
        return self._num_uncommitted() > 0

    def advance(self, commanded: bool) -> StepResult:
        """Commit a computed step, if there is one; then plan a step if no uncommitted step is left.

        Args:
            commanded: True if commands were applied since the last call. A step planned ahead is
                then withdrawn, because the commands may change the next step.
        """
        if self._error is not None:
            raise self._error
        if commanded:
            self._withdraw_pending()
        result = StepResult()
        self._outputs.drain_events(result)
        if self._computed:
            done = self._computed[0]
            self._outputs.commit(done.plan, done.sampled, done.seconds, result)
            with self._changed:
                self._computed.popleft()
                self._begin_masks()
                self._changed.notify_all()
        if not self.busy:
            plan = self._batcher.plan()
            # These events set the sampling parameters of new rows, so process them before the step
            # runs.
            self._outputs.drain_events(result)
            self._enqueue(plan)
        return result

    def plan_next(self) -> None:
        """Plan a second step while one is in flight, unless it needs the first's result."""
        if self._num_uncommitted() == 1:
            self._enqueue(self._batcher.plan())

    def stop(self) -> None:
        """End the second thread after the step that it is running, and wait for the thread."""
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
                if plan.ahead and self._computed:  # the tokens of the previous step are known
                    plan.fill(self._computed[-1].sampled.tokens)
                self._pending.append(plan)
                self._changed.notify_all()

    def _withdraw_pending(self) -> None:
        """Withdraw pending steps, newest first, and stop at a step that copies blocks."""
        plans = []
        with self._changed:
            while self._pending and not len(self._pending[-1].copies):
                plans.append(self._pending.pop())
        for plan in plans:
            self._batcher.withdraw(plan)

    def _begin_masks(self) -> None:
        """Start to fill the token masks of the running step; earlier steps must be committed."""
        if self._computing is not None:
            self._executor.begin_masks(self._computing, self._batcher.table)

    # ------------------------------------------------------------ second thread

    def _run(self) -> None:
        try:
            while (plan := self._next()) is not None:
                began = time.perf_counter()
                with self._changed:
                    # If the previous step is uncommitted, `advance` begins the masks when it
                    # commits that step.
                    if not self._computed:
                        self._executor.begin_masks(plan, self._batcher.table)
                self._executor.broadcast(plan)
                logits = self._executor.execute_model(plan)
                self._wait_until_committed()
                sampled = self._executor.sample(plan, logits, self._batcher.table)
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
        """Wait for the commit of the previous step, because sampling reads the answers so far."""
        with self._changed:
            self._changed.wait_for(lambda: not self._computed or self._stopping)


class DeviceStepper(OverlapStepper):
    """Overlap stepper for a GPU.

    The engine's thread launches steps. A second thread waits for the sampled tokens.
    """

    def __init__(
        self,
        batcher: Batcher,
        executor: Executor,
        outputs: OutputProcessor,
        changed: threading.Condition,
    ) -> None:
        # launched steps whose tokens have not arrived on the host
        self._launched: deque[LaunchedStep] = deque()
        self._newest: LaunchedStep | None = None
        super().__init__(batcher, executor, outputs, changed)

    def plan_next(self) -> None:
        """Plan the next step, unless it needs the tokens of the newest step on the host.

        The next step needs these tokens if the newest step is sampled on the host, or if a mask of
        the next step reads these tokens.
        """
        newest = self._newest
        if newest is not None and newest.tokens is not None and not newest.reads_log:
            super().plan_next()

    def _num_uncommitted(self) -> int:
        with self._changed:
            return len(self._launched) + len(self._computed)

    def _enqueue(self, plan: StepPlan | None) -> None:
        if plan is not None:
            self._executor.broadcast(plan)
            self._newest = self._executor.launch(plan, self._newest, self._batcher.table)
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
