"""Stand-ins for the model and its device: step times, drawn tokens and block contents."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.loadtests.simulator.model.hash_model import HashModel
from penstock.loadtests.simulator.model.timing import Floats
from penstock.workers.scheduling.sequence import Ints, StepPlan


class Executor(Protocol):
    """Interface of a simulated model with its KV cache."""

    slowness: float  # factor on step times; 1: normal, inf: hangs

    def seconds(self, plan: StepPlan) -> float:
        """Return the seconds that the step takes."""
        ...

    def seconds_of(self, plan: StepPlan, num: int) -> Floats:
        """Return [num] seconds: of this decode step and of the `num - 1` after it."""
        ...

    def run(self, plan: StepPlan, choices: Ints) -> Ints:
        """Return the tokens of the plan's sampling rows, in order.

        `choices` holds the choice index of every row of the sequence table.
        """
        ...

    def predict(self, plan: StepPlan, num: int) -> Ints | None:
        """Return [num, B] tokens of the `num` steps after this one, or None if they must be run."""
        ...

    def read(self, blocks: Ints) -> Sequence[int]:
        """Return the contents of blocks, for a KV transfer."""
        ...

    def write(self, blocks: Ints, content: Sequence[int]) -> None:
        """Write received contents into blocks."""
        ...

    def poison(self, blocks: Ints) -> None:
        """Overwrite free blocks, so that any later read of them is detected."""
        ...


class TimedHashModel:
    """The hash model with simulated step times: tokens depend on the KV slots it reads."""

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
