"""Runs the steps of a worker in virtual time: one event per step, or one for many quiet steps.

`FastForward` returns how many steps will need no scheduling decision. These quiet steps become one
event, a fast-forward. Their times are the same as if they ran one by one. If a message arrives
during a fast-forward, the steps that have ended by then are committed. The step in progress
continues as a single step.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

import numpy as np

from penstock.loadtests.simulator.model.executors import Executor
from penstock.loadtests.simulator.model.timing import Floats
from penstock.loadtests.simulator.world.checks import check
from penstock.loadtests.simulator.world.clock import Act, Process
from penstock.loadtests.simulator.world.fast_forward import FastForward
from penstock.loadtests.simulator.world.shared_cores import SharedCores
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.kv_pool import State
from penstock.workers.scheduling.sequence import Ints, StepOutput, StepPlan


class StepListener(Protocol):
    """Interface of the object that handles the results of simulated steps."""

    def on_steps(self, output: StepOutput, tokens: Ints, ends: Floats, passed: bool) -> None:
        """Handle the results of one step, or of several quiet steps.

        Args:
            output: output of the first step; the other steps continue the same sequences. A
                sequence can finish only if there is a single step.
            tokens: [n, S] sampled tokens of the n steps.
            ends: [n] end times of the steps.
            passed: whether a message to the worker was sent before the messages about these steps.
        """
        ...

    def on_plan(self) -> None:
        """Handle the batcher's events. Planning a step may have produced some."""
        ...

    def is_load_known(self) -> bool:
        """Return True if the last load that was sent has the current queue and running sequences.

        Other values of the load, which also change in quiet steps, are not compared.
        """
        ...

    def on_idle(self) -> None:
        """Handle the case that the worker has processed its messages and has no step to run."""
        ...


@dataclass(frozen=True, slots=True)
class QuietSteps:
    """A fast-forward, which runs consecutive quiet steps as one event."""

    id: int
    plan: StepPlan  # plan of the first step
    seconds: Floats  # duration of each step, [n]
    ends: Floats  # end time of each step, [n]


class StepRunner:
    """Runs steps while there is work, and posted actions between the steps.

    Args:
        fast_forwards: whether to combine steps in which no request arrives or ends into one event.
        check_every: number of steps between checks of the block invariants; 0 means never.
    """

    def __init__(
        self,
        process: Process,
        batcher: Batcher,
        executor: Executor,
        listener: StepListener,
        fast_forwards: bool,
        check_every: int,
    ) -> None:
        self.fast_forwards = fast_forwards
        self.num_steps = 0
        self.num_tokens = 0
        self.busy_seconds = 0.0
        self.prompt_seconds = 0.0  # seconds of all steps with prefill tokens
        self.last_seconds = 0.0  # seconds of the last step
        # The cores that workers of one machine share; None if not shared.
        self.cores: SharedCores | None = None
        self._process = process
        self._batcher = batcher
        self._skips = FastForward(batcher.state)
        self._executor = executor
        self._listener = listener
        self._check_every = check_every
        self._inbox: deque[Act] = deque()
        self._in_step = False
        self._quiet_steps: QuietSteps | None = None
        self._numbers = count()
        self._single_until = 0.0  # time of the next message, before which steps are not combined

    def post(self, act: Act) -> None:
        """Run `act` at the next step boundary, which may be now."""
        self.catch_up()
        self._inbox.append(act)
        self._wake()

    def disturb(self, time: float) -> None:
        """Prepare for a message that arrives at `time`. Until then, steps are not combined."""
        self.catch_up(passed=True)
        self._single_until = max(self._single_until, time)

    @property
    def is_fast_forwarding(self) -> bool:
        return self._quiet_steps is not None

    def catch_up(self, passed: bool = False) -> None:
        """End a fast-forward.

        The steps that have ended are committed, and the current one finishes as a single step.
        """
        leap, self._quiet_steps = self._quiet_steps, None
        if leap is None:
            return
        plan: StepPlan | None = leap.plan
        over = int(leap.ends.searchsorted(self._process.clock.now, "right"))
        over = min(over, len(leap.ends) - 1)
        if over:
            self._record(leap, over, passed)
            plan = self._plan(float(leap.ends[over - 1]))
        assert plan is not None, (
            "there is no next step, although more steps without a scheduling decision were "
            "predicted"
        )
        self._begin(plan, float(leap.seconds[over]), float(leap.ends[over]))

    def _wake(self) -> None:
        if not self._in_step:
            self._in_step = True
            self._process.after(0.0, self._boundary)

    def _boundary(self) -> None:
        """Run the posted actions. Then begin the next step if there is work."""
        has_messages, now = bool(self._inbox), self._process.clock.now
        while self._inbox:
            self._inbox.popleft()()
        plan = self._plan(now)
        if self.cores is not None:
            self.cores.set_computing(self, plan is not None)
        if plan is None:
            self._in_step = False
            if has_messages:
                self._listener.on_idle()
            if self._inbox:
                self._wake()
        elif (
            has_messages
            or self._inbox
            or now < self._single_until
            or not self._fast_forward(plan, now)
        ):
            seconds = self._executor.seconds(plan) * self._slowdown()
            self._begin(plan, seconds, now + seconds)

    def _slowdown(self) -> float:
        return 1.0 if self.cores is None else self.cores.slowdown(self)

    def _plan(self, now: float) -> StepPlan | None:
        batcher = self._batcher
        if self._check_every:
            free = np.flatnonzero(batcher.pool.state == State.FREE)
            self._executor.poison(free.astype(np.int32))
        plan = batcher.plan()
        self._listener.on_plan()
        if self._check_every and self.num_steps % self._check_every == 0:
            check(batcher, plan)
        return plan

    def _begin(self, plan: StepPlan, seconds: float, end: float) -> None:
        self._process.at(end, partial(self._commit, plan, seconds))

    def _commit(self, plan: StepPlan, seconds: float) -> None:
        output = self._compute(plan)
        self.busy_seconds += seconds
        if len(plan.tokens) > len(plan.rows):
            self.prompt_seconds += seconds
        self.last_seconds = seconds
        self._batcher.state.budget.record(plan, seconds)
        self._listener.on_steps(
            output, output.tokens[None], np.array([self._process.clock.now]), False
        )
        self._boundary()

    def _compute(self, plan: StepPlan) -> StepOutput:
        drawn, forced = self._executor.run(plan, self._batcher.table)
        output = self._batcher.commit(plan, drawn, forced=forced)
        self.num_steps += 1
        self.num_tokens += len(output.keys)
        return output

    # ------------------------------------------------------------ fast-forward

    def _fast_forward(self, plan: StepPlan, now: float) -> bool:
        """Run this step and the quiet steps after it as one event. Return False if none follow."""
        num = self._skips.num_skippable() if self.fast_forwards else 0
        if num < 2 or not self._listener.is_load_known():
            return False
        seconds = self._executor.seconds_of(plan, num) * self._slowdown()
        leap = QuietSteps(next(self._numbers), plan, seconds, _sums(now, seconds))
        self._quiet_steps = leap
        self._process.at(float(leap.ends[-1]), partial(self._finish_quiet_steps, leap.id))
        return True

    def _finish_quiet_steps(self, number: int) -> None:
        """Commit all steps of a fast-forward that was not interrupted."""
        leap = self._quiet_steps
        if leap is not None and leap.id == number:
            self._quiet_steps = None
            self._record(leap, len(leap.ends), False)
            self._boundary()

    def _record(self, leap: QuietSteps, num: int, passed: bool) -> None:
        """Commit the first `num` steps of a fast-forward."""
        ends, seconds = leap.ends[:num], leap.seconds[:num]
        output = self._compute(leap.plan)
        drawn = self._executor.predict(leap.plan, num - 1)
        if drawn is None:
            drawn = self._compute_each(output, ends[:-1])
        elif num > 1:
            self._skips.skip(drawn)
            self.num_steps += num - 1
            self.num_tokens += drawn.size
        self.busy_seconds = float(_sums(self.busy_seconds, seconds)[-1])
        self.last_seconds = float(seconds[-1])
        if self._batcher.limits.tpot_slo_seconds:
            for each in seconds.tolist():
                self._batcher.state.budget.record(leap.plan, each)
        tokens = np.concatenate((output.tokens[None], drawn))
        self._listener.on_steps(output, tokens, ends, passed)

    def _compute_each(self, first: StepOutput, starts: Floats) -> Ints:
        """Run quiet steps one by one, for executors that cannot predict. Return the tokens [n, B].

        `starts` contains the start time of each step.
        """
        drawn = np.zeros((len(starts), len(first.tokens)), np.int32)
        for index, start in enumerate(starts.tolist()):
            plan = self._plan(start)
            assert plan is not None, (
                "there is no next step, although more steps without a scheduling decision were "
                "predicted"
            )
            output = self._compute(plan)
            assert output.keys == first.keys, (
                "the sequences of a step changed within steps that were predicted to need no "
                "scheduling decision"
            )
            drawn[index] = output.tokens
        return drawn


def _sums(start: float, seconds: Floats) -> Floats:
    """Return [n] running sums of `start` and `seconds`, rounded as if summed step by step."""
    sums = np.empty(len(seconds) + 1)
    sums[0], sums[1:] = start, seconds
    return sums.cumsum(out=sums)[1:]
