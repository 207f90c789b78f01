"""Simulated models and devices: step times, sampled tokens and contents of blocks."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.loadtests.simulator.model.hash_model import HashModel
from penstock.loadtests.simulator.model.timing import Floats
from penstock.workers.scheduling.sequence import Ints, StepPlan


class Executor(Protocol):
    """Interface of a simulated model with its KV cache."""

    slowness: float  # step times are multiplied by this; inf: steps hang

    def seconds(self, plan: StepPlan) -> float:
        """Return the duration of the step in seconds."""
        ...

    def seconds_of(self, plan: StepPlan, num: int) -> Floats:
        """Return the seconds [num] of this decode step and of the `num - 1` steps after it."""
        ...

    def run(self, plan: StepPlan, choices: Ints) -> Ints:
        """Return the sampled tokens of the plan's sampling rows, in order.

        `choices` has the choice index of each row of the sequence table.
        """
        ...

    def predict(self, plan: StepPlan, num: int) -> Ints | None:
        """Return the tokens [num, B] of the next `num` steps, or None if the steps must be run."""
        ...

    def read(self, blocks: Ints) -> Sequence[int]:
        """Return the contents of blocks, for a KV transfer."""
        ...

    def write(self, blocks: Ints, content: Sequence[int]) -> None:
        """Write received contents into blocks."""
        ...

    def poison(self, blocks: Ints) -> None:
        """Overwrite free blocks, so that reading them later is detected."""
        ...


class TimedHashModel:
    """The hash model with simulated step times; its tokens depend on the KV slots that are read."""

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
