"""Simulated models and devices, with step times, sampled tokens and contents of blocks."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.simulator.constraints.vocabulary import VOCAB_SIZE, grammars
from penstock.loadtests.simulator.model.hash_model import HashModel
from penstock.loadtests.simulator.model.timing import Floats
from penstock.workers.sampling.token_masks import TokenMasks
from penstock.workers.scheduling.forced_tokens import NO_FORCED, ForcedTokens
from penstock.workers.scheduling.sequence import Ints, StepPlan
from penstock.workers.scheduling.table import SequenceTable


class Executor(Protocol):
    """Interface of a simulated model with its KV cache."""

    slowness: float  # factor of step times; infinite if steps hang
    reads_tokens: bool  # whether steps depend on the tokens, positions and slots of their plans

    def admit(self, row: int, params: SamplingParams) -> None:
        """Set the sampling parameters of a new sequence in its row of the sequence table."""
        ...

    def seconds(self, plan: StepPlan) -> float:
        """Return the duration of the step in seconds."""
        ...

    def seconds_of(self, plan: StepPlan, num: int) -> Floats:
        """Return the seconds [num] that this decode step and the `num - 1` steps after it take."""
        ...

    def run(self, plan: StepPlan, table: SequenceTable) -> tuple[Ints, ForcedTokens]:
        """Return the sampled tokens of the plan's sampling rows, in order, and forced tokens."""
        ...

    def predict(self, plan: StepPlan, num: int) -> Ints | None:
        """Return the tokens [num, B] that the plan's B sequences get in the next `num` steps.

        Returns None if the tokens are not known before the steps have run.
        """
        ...

    def read(self, blocks: Ints) -> Sequence[int]:
        """Return the contents of blocks, for a KV transfer."""
        ...

    def write(self, blocks: Ints, content: Sequence[int]) -> None:
        """Write received contents into blocks."""
        ...

    def poison(self, blocks: Ints) -> None:
        """Overwrite free blocks, so that a later read of them is detected."""
        ...


class TimedHashModel:
    """The hash model with simulated step times. Its tokens depend on the KV slots that are read.

    Rows with a constraint or a thinking budget draw from the tokens that the product's masks allow.
    A step adds up to `max_forced` forced tokens to such a row.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        step_seconds: float,
        token_seconds: float,
        max_forced: int,
    ) -> None:
        self.slowness = 1.0
        self.reads_tokens = True
        self._num_rows = num_rows
        self._max_forced = max_forced
        # Masks, which are created for the first sequence that needs them.
        self._masks: TokenMasks | None = None
        self._model = HashModel(num_blocks, block_size)
        self._step_seconds = step_seconds
        self._token_seconds = token_seconds

    def admit(self, row: int, params: SamplingParams) -> None:
        wanted = params.structured_outputs
        needs_masks = wanted is not None or params.thinking_budget is not None
        if self._masks is None and needs_masks:
            self._masks = TokenMasks(self._num_rows, VOCAB_SIZE, self._max_forced)
        if self._masks is not None:
            grammar = None if wanted is None else grammars().compile(wanted)
            self._masks.admit(row, params, grammar)

    def seconds(self, plan: StepPlan) -> float:
        return self.slowness * (self._step_seconds + self._token_seconds * len(plan.tokens))

    def seconds_of(self, plan: StepPlan, num: int) -> Floats:
        return np.full(num, self.seconds(plan))

    def run(self, plan: StepPlan, table: SequenceTable) -> tuple[Ints, ForcedTokens]:
        masks = None
        if self._masks is not None:
            rows = plan.sampling_rows
            indices = table.num_tokens[rows] - table.num_prompt[rows]
            masks = self._masks.take(rows, indices, table)
        drawn = self._model.run(plan, table.choices, masks)
        return drawn, NO_FORCED if masks is None else masks.forced

    def predict(self, plan: StepPlan, num: int) -> None:
        return None

    def read(self, blocks: Ints) -> Sequence[int]:
        return [self._model.kv[slot] for slot in self._model.slots_of(blocks)]

    def write(self, blocks: Ints, content: Sequence[int]) -> None:
        for slot, value in zip(self._model.slots_of(blocks), content, strict=True):
            self._model.kv[slot] = value

    def poison(self, blocks: Ints) -> None:
        self._model.poison(blocks)
