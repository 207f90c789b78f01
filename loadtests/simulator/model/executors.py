"""What stands in for model and device: how long a step takes, what it draws, what blocks hold."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.loadtests.simulator.model.hash_model import HashModel
from penstock.loadtests.simulator.model.timing import Floats
from penstock.workers.scheduling.sequence import Ints, StepPlan


class Executor(Protocol):
    """A model on a device, with its KV."""

    slowness: float  # 1: as it should be

    def seconds(self, plan: StepPlan) -> float:
        """How long that step takes."""
        ...

    def seconds_of(self, plan: StepPlan, num: int) -> Floats:
        """[num] how long that step of decodes takes, and those after it."""
        ...

    def run(self, plan: StepPlan, choices: Ints) -> Ints:
        """What its drawing rows draw, in order; `choices` are those of every row of the table."""
        ...

    def predict(self, plan: StepPlan, num: int) -> Ints | None:
        """[num, B] what the steps after that one draw; None: they have to be computed."""
        ...

    def read(self, blocks: Ints) -> Sequence[int]:
        """What blocks hold, to be sent."""
        ...

    def write(self, blocks: Ints, content: Sequence[int]) -> None:
        """What was sent, into blocks."""
        ...

    def poison(self, blocks: Ints) -> None:
        """Nobody may read what these held."""
        ...


class TimedHashModel:
    """The fold model, with steps that take time: what it reads and writes decides every token."""

    def __init__(
        self, num_blocks: int, block_size: int, step_seconds: float, token_seconds: float
    ) -> None:
        self.slowness = 1.0
        self._model = HashModel(num_blocks, block_size)
        self._step_seconds = step_seconds
        self._token_seconds = token_seconds

    def seconds(self, plan: StepPlan) -> float:
        return self.slowness * (self._step_seconds + self._token_seconds * len(plan.tokens))

    def seconds_of(self, plan: StepPlan, num: int) -> Floats:
        return np.full(num, self.seconds(plan))

    def run(self, plan: StepPlan, choices: Ints) -> Ints:
        return self._model.run(plan, choices)

    def predict(self, plan: StepPlan, num: int) -> None:
        return None

    def read(self, blocks: Ints) -> Sequence[int]:
        return [self._model.kv[slot] for slot in self._model.slots_of(blocks)]

    def write(self, blocks: Ints, content: Sequence[int]) -> None:
        for slot, value in zip(self._model.slots_of(blocks), content, strict=True):
            self._model.kv[slot] = value

    def poison(self, blocks: Ints) -> None:
        self._model.poison(blocks)
