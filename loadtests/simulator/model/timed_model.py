"""A simulated device that models only the times of steps."""

import numpy as np

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.simulator.model.jitter import StepJitter
from penstock.loadtests.simulator.model.timing import Floats, Timing
from penstock.workers.scheduling.forced_tokens import NO_FORCED, ForcedTokens
from penstock.workers.scheduling.sequence import Ints, StepPlan
from penstock.workers.scheduling.table import SequenceTable


class TimedModel:
    """A model of step times only, in which every sampled token is 0.

    Args:
        timing: the time model.
        seed: the same seed gives the same jitter.
        worker: name of the worker.
    """

    def __init__(self, timing: Timing, seed: int = 0, worker: str = "") -> None:
        self.slowness = 1.0
        self.reads_tokens = False
        self._timing = timing
        self._jitter = StepJitter(timing.jitter, seed, worker) if timing.jitter else None

    def admit(self, row: int, params: SamplingParams) -> None:
        pass

    def seconds(self, plan: StepPlan) -> float:
        seconds = self.slowness * self._timing.step(plan)
        if self._jitter is None:
            return seconds
        return seconds * self._jitter.factors(plan.number, 1).item()

    def seconds_of(self, plan: StepPlan, num: int) -> Floats:
        seconds: Floats = self.slowness * self._timing.decodes(plan, num)
        return seconds if self._jitter is None else seconds * self._jitter.factors(plan.number, num)

    def run(self, plan: StepPlan, table: SequenceTable) -> tuple[Ints, ForcedTokens]:
        return np.zeros(len(plan.sampling_rows), np.int32), NO_FORCED

    def predict(self, plan: StepPlan, num: int) -> Ints:
        return np.zeros((num, len(plan.rows)), np.int32)

    def read(self, blocks: Ints) -> tuple[int, ...]:
        return ()

    def write(self, blocks: Ints, content: object) -> None:
        pass

    def poison(self, blocks: Ints) -> None:
        pass
