"""Executes the steps of an engine: broadcasts a plan to the ranks, runs the model, samples.

Only one thread at a time may call an executor. Another thread may call `wait` of a launched step.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from penstock.common.grammar.matcher import CompiledGrammar
from penstock.common.sampling_params import SamplingParams
from penstock.workers.engine.model_runner import ModelRunner
from penstock.workers.engine.warm_up import warm_up_block_moves
from penstock.workers.gpu.device_runner import DeviceRunner, capture_graphs
from penstock.workers.gpu.pinned import AsyncTokenCopy
from penstock.workers.gpu.streams import Streams
from penstock.workers.parallel.step_broadcast import PlanWriter
from penstock.workers.parallel.step_codec import CAPTURE_GRAPHS, encode
from penstock.workers.rank.core_sharing import CoreSharing
from penstock.workers.rank.rank_runtime import ProgressCallback
from penstock.workers.sampling.beam_sampler import BeamSampler
from penstock.workers.sampling.beam_search import BeamSearches
from penstock.workers.sampling.prompt_scores import score_prompts
from penstock.workers.sampling.sampler import Sampled, Sampler
from penstock.workers.scheduling.forced_tokens import ForcedTokens
from penstock.workers.scheduling.sequence import Ints, StepPlan
from penstock.workers.scheduling.table import SequenceTable


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was launched on a device."""

    plan: StepPlan
    tokens: Tensor | None  # [S] tokens on the device; None if they were sampled on the host
    reads_log: bool  # whether sampling the next step needs the tokens of this step on the host
    wait: Callable[[], Sampled]  # waits for the step's tokens; callable from any thread
    began: float  # start time in seconds, from `time.perf_counter`


class Executor:
    """The model runner and the sampler of rank 0, and the broadcast of plans to the other ranks.

    Args:
        runner: runs the model on this rank.
        sampler: samples the tokens.
        searches: the running beam searches.
        plan_writer: sends plans to the other ranks; None: there are no other ranks.
        cores: sets the number of threads of each step; None: the number is fixed.

    Attributes:
        on_device: whether steps are launched asynchronously, as on a GPU.
        gap_seconds: time between the end of the previous step and the start of the newest step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        searches: BeamSearches,
        plan_writer: PlanWriter | None,
        cores: CoreSharing | None = None,
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self.streams = Streams(runner.decoder.device)
        self.on_device = isinstance(runner, DeviceRunner)
        self.gap_seconds = 0.0
        self._beams = BeamSampler(searches, sampler)
        self._plan_writer = plan_writer
        self._cores = cores
        self._sampled_at = time.perf_counter()

    def admit(
        self,
        row: int,
        params: SamplingParams,
        choice: int,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Set the sampling parameters of a row of the sequence table for a new sequence."""
        with self.computing():  # copy the parameters on the stream that runs the steps
            self.sampler.admit(row, params, choice, grammar)

    def broadcast(self, plan: StepPlan) -> None:
        """Send a plan to the other ranks, which run the same step. Call this before `execute`."""
        if self._plan_writer is not None:
            # The tokens of a step planned ahead are not known yet.
            # On a device, `launch` sends them to the other ranks later.
            self._plan_writer.write(encode(plan, plan.ahead and self.on_device))

    def execute(self, plan: StepPlan, table: SequenceTable) -> Sampled:
        """Run the model for a step and sample its tokens; earlier steps must be committed."""
        if self.on_device:
            return self.launch(plan, None, table).wait()
        logits = self.execute_model(plan, partial(self.begin_masks, plan, table))
        return self.sample(plan, logits, table)

    def begin_masks(self, plan: StepPlan, table: SequenceTable) -> None:
        """Start to fill a step's token masks on another thread, while the model computes.

        All earlier steps must have been committed, and `sample` must follow.
        """
        self.sampler.masks.begin(plan.sampling_rows, _answer_indices(plan, table), table)

    def execute_model(self, plan: StepPlan, beside: Callable[[], None] | None = None) -> Tensor:
        """Run the model; return the logits [S, vocab_size] of the sampling rows.

        beside: starts work on other threads; see `ModelRunner.run`.
        """
        if self._cores is not None:
            self._cores.begin_step()
        self.gap_seconds = time.perf_counter() - self._sampled_at
        return self.runner.run(plan, beside=beside)

    def sample(self, plan: StepPlan, logits: Tensor, table: SequenceTable) -> Sampled:
        """Sample the tokens of a step; all earlier steps must have been committed."""
        rows, indices = plan.sampling_rows, _answer_indices(plan, table)
        sampled = self.sampler.sample(logits, rows, indices, table)
        if sampled.candidates is not None:
            sampled = self._beams.advance(sampled, sampled.candidates, logits, rows, table)
        if len(plan.scored):
            prompts = score_prompts(plan, self.runner.prompt_logits(), self.sampler, table)
            sampled = replace(sampled, prompts=prompts)
        self._sampled_at = time.perf_counter()
        return sampled

    def launch(
        self, plan: StepPlan, before: LaunchedStep | None, table: SequenceTable
    ) -> LaunchedStep:
        """Launch a step on the device, including its sampling if sampling needs no host data.

        If sampling needs host data, sample on the host before returning; all earlier steps must
        then be committed. If `plan.ahead` is set, take the tokens of `before` (the step launched
        before this one) and send them to the other ranks. Call `broadcast(plan)` first.
        """
        began = time.perf_counter()
        drawn = before.tokens if plan.ahead and before is not None else None
        self.gap_seconds = 0.0 if plan.ahead else began - self._sampled_at
        with self.computing():
            if drawn is not None:
                drawn = self.runner.broadcast_tokens(drawn)
            logits = self.runner.run(plan, drawn)  # `run` returns while the device still computes
            rows, indices = plan.sampling_rows, _answer_indices(plan, table)
            # `indices + 1` are the answer indices of the tokens that the next step samples.
            reads_log = self.sampler.masks.reads_log(rows, indices + 1)
            if len(plan.scored) or not self.sampler.can_sample_on_device(rows):
                sampled = self.sample(plan, logits, table)
                return LaunchedStep(plan, None, reads_log, lambda: sampled, began)
            tokens, finite, forced = self.sampler.sample_on_device(logits, rows, indices, table)
            arriving = self.streams.copy_to_host(tokens, finite)
        wait = partial(self._finish_launch, arriving, forced)
        return LaunchedStep(plan, tokens, reads_log, wait, began)

    def computing(self) -> AbstractContextManager[object]:
        """Return a context; device work launched in it runs after all earlier engine work."""
        return self.streams.computing()

    def warm_up(self, captured: ProgressCallback) -> None:
        """Launch the kernels of KV transfers; on a GPU, also capture CUDA graphs of decode steps.

        All ranks capture together. `captured` is called with the number of captured graphs and
        their total.
        """
        with self.computing():
            warm_up_block_moves(self.runner.cache.data)
        if self._plan_writer is not None:
            self._plan_writer.write(CAPTURE_GRAPHS)
        capture_graphs(self.runner, captured)

    def idle(self) -> None:
        """Leave the cores to other workers of this machine until the next step."""
        if self._cores is not None:
            self._cores.idle()

    def stop(self) -> None:
        """End the other ranks. Call this after the last step."""
        if self._plan_writer is not None:
            self._plan_writer.end()

    def _finish_launch(self, arriving: AsyncTokenCopy, forced: ForcedTokens) -> Sampled:
        tokens, finite = arriving.wait()
        self._sampled_at = time.perf_counter()
        return Sampled(tokens, finite, [None] * len(tokens), forced=forced)


def _answer_indices(plan: StepPlan, table: SequenceTable) -> Ints:
    """Return [S]: index in its answer of each token to sample.

    Earlier steps need not be committed.
    """
    lengths = plan.context_lens[plan.samples]
    if len(plan.forks):
        lengths = np.concatenate((lengths, table.num_tokens[plan.forks[:, 1]]))
    indices: Ints = lengths - table.num_prompt[plan.sampling_rows]
    return indices
