"""The engine: scheduler, model and sampler as one object.

All methods are called from one thread, except that an `OverlapStepper` calls `compute` and `sample`
from a second thread. `step` runs a complete step and returns its result. If a sequence fails, only
that sequence ends; if the model raises an exception, the engine stops.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.common.sampling_params import SamplingParams
from penstock.common.worker_load import WorkerLoad
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.step_times import StepTimes
from penstock.workers.engine.warm_up import warm_up_block_moves, warm_up_sequences
from penstock.workers.gpu.cuda_graphs import CudaCaptures
from penstock.workers.gpu.device_runner import DeviceRunner
from penstock.workers.gpu.pinned import AsyncTokenCopy
from penstock.workers.gpu.streams import Streams
from penstock.workers.health.canary import KEY as CANARY
from penstock.workers.health.canary import make_canary
from penstock.workers.health.expert_balance import ExpertBalance
from penstock.workers.models.protocols import Model
from penstock.workers.parallel.step_codec import encode
from penstock.workers.rank.fingerprint import model_fingerprint
from penstock.workers.rank.rank_runtime import ProgressCallback, load_rank
from penstock.workers.sampling.beam_search import BeamSearches, Candidates, Hypothesis
from penstock.workers.sampling.sampler import PromptLogprobs, Sampled, Sampler, TokenLogprobs
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.sequence import (
    Admitted,
    Finished,
    Ints,
    Key,
    NewSequence,
    Reserved,
    SchedulerEvent,
    StepOutput,
    StepPlan,
    Yielded,
)


@dataclass(frozen=True, slots=True)
class Receiving:
    """Blocks [n] that are reserved for positions [have, stop) and written by a KV transfer."""

    key: Key
    have: int
    stop: int
    blocks: Ints


@dataclass(frozen=True, slots=True)
class BeamResult:
    """The complete answers of a finished beam search, best first."""

    key: Key
    answers: list[Hypothesis]


@dataclass(slots=True)
class StepResult:
    """Result of one step. `logprobs` has one entry per token of `output`."""

    output: StepOutput | None = None  # None: there was nothing to compute
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)
    beam_results: list[BeamResult] = field(default_factory=list)
    failed: list[Key] = field(default_factory=list)  # ended because their logits were not finite
    yielded: list[Yielded] = field(default_factory=list)
    reserved: list[Receiving] = field(default_factory=list)
    finished: list[Key] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return self.output is None and not (self.yielded or self.reserved or self.finished)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was launched on a device."""

    plan: StepPlan
    tokens: Tensor | None  # [S] on the device; None: sampled on the host
    wait: Callable[[], Sampled]  # waits for the step's tokens; callable from any thread
    began: float  # start time in seconds, from `time.perf_counter`


class Engine:
    """One model on one or several ranks. This process is rank 0; other ranks run a `Follower`.

    `progress` is called with (done, total) bytes of weights, `on_stage` with the name of each
    start-up stage. `store` is the rendezvous if there are several ranks; `decoder` is a model that
    is already loaded. Raises ValueError, with a message of one line, if the engine cannot start.
    """

    def __init__(
        self,
        config: WorkerConfig,
        progress: ProgressCallback = lambda done, total: None,
        store: Store | None = None,
        decoder: Model | None = None,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:
        runtime = load_rank(config, progress, store, decoder, on_stage)
        self.spec, self.limits, self.cache = runtime.spec, runtime.limits, runtime.cache
        self.model = model_fingerprint(config.model)
        self.layout = runtime.layout(self.model)
        self.deterministic = config.deterministic
        self._plan_writer = runtime.connect_as_leader(store)  # to other ranks; None: there are none
        self.movers = runtime.movers(self._plan_writer)
        self.batcher = Batcher(self.limits)
        self._expert_balance = ExpertBalance(runtime.expert_counts())
        device = runtime.decoder.device
        self._runner = runtime.runner()
        self._sampler = Sampler(self.limits.max_sequences, self.spec.vocab_size, device)
        self._streams = Streams(device)
        self.on_device = isinstance(self._runner, DeviceRunner)
        ahead = self.on_device if config.plan_ahead is None else config.plan_ahead
        self.plans_ahead = ahead and config.pp == 1
        self._in_flight: deque[StepPlan] = deque()  # steps sent to the ranks, but not committed
        self._live: dict[Key, NewSequence] = {}  # sequences that have not ended or yielded
        self._beam_searches = BeamSearches()
        self._has_canary = False  # whether `_live` contains a canary
        self._step_seconds = 0.0
        self._times = StepTimes()
        self._num_steps = 0
        self._sampled_at = time.perf_counter()
        self._gap_seconds = 0.0

    # ------------------------------------------------------------ commands

    def submit(self, new: NewSequence) -> None:
        """Queue a sequence. Raises NeverFits or QueueFull if the sequence is refused."""
        self.batcher.submit(new)
        self._live[new.key] = new
        if new.params.use_beam_search:
            self._beam_searches.open(
                new.key, new.params, self.limits.max_model_len - new.num_prompt
            )

    def submit_canary(self) -> None:
        """Queue a canary. Raises QueueFull if the canary is refused."""
        self.submit(make_canary())
        self._has_canary = True

    def drop_choice(self, key: Key, choice: int) -> None:
        """Remove one choice of a sequence; ignore an unknown key or choice."""
        self.batcher.drop_choice(key, choice)

    def drop(self, key: Key) -> None:
        """Remove a sequence in any state, or its lease; ignore an unknown key."""
        self.batcher.drop(key)
        self._beam_searches.close(key)
        self._live.pop(key, None)

    def request_yield(self, key: Key) -> None:
        """Yield a sequence and lease its blocks at its next step boundary; ignore unknown keys."""
        self.batcher.request_yield(key)

    # ------------------------------------------------------------ steps

    def step(self) -> StepResult:
        """Plan, run and commit one step, if there is anything to compute."""
        started = time.perf_counter()
        result = StepResult()
        # Keep one step in flight per pipeline stage, so that no stage is idle.
        while len(self._in_flight) < self.limits.num_stages and (plan := self.plan(result)):
            self._broadcast(plan)
            self._in_flight.append(plan)
        if self._in_flight:
            plan = self._in_flight[0]
            sampled = self._execute(plan)
            self._in_flight.popleft()
            self.commit(plan, sampled, time.perf_counter() - started, result)
        return result

    def _execute(self, plan: StepPlan) -> Sampled:
        if self.on_device:
            return self.launch(plan, None).wait()
        return self.sample(plan, self.compute(plan))

    def plan(self, result: StepResult) -> StepPlan | None:
        """Plan the next step; return None if there is nothing to compute."""
        plan = self.batcher.plan(time.perf_counter())
        self.drain_events(result)
        return plan

    def plan_ahead(self) -> StepPlan | None:
        """Plan another step while one is in flight; None if that step must be committed first."""
        return self.batcher.plan(time.perf_counter())

    def compute(self, plan: StepPlan) -> Tensor:
        """Run the model; return logits [S + P, vocab_size] of sampling rows, then scored tokens."""
        if not any(plan is each for each in self._in_flight):
            self._broadcast(plan)
        self._gap_seconds = time.perf_counter() - self._sampled_at
        return self._runner.run(plan)

    def _broadcast(self, plan: StepPlan) -> None:
        """Send the plan to the other ranks, which run the same step."""
        if self._plan_writer is not None:
            self._plan_writer.write(encode(plan))

    def stop(self) -> None:
        """End the other ranks. Call this after the last step."""
        if self._plan_writer is not None:
            self._plan_writer.end()

    def sample(self, plan: StepPlan, logits: Tensor) -> Sampled:
        """Sample the tokens of a step; all earlier steps must have been committed."""
        rows, table = plan.sampling_rows, self.batcher.table
        indices = self._indices(plan)
        sampled = self._sampler.sample(logits[: len(rows)], rows, indices, table)
        if sampled.candidates is not None:
            sampled = self._advance_beams(sampled, sampled.candidates, rows, logits)
        if len(plan.scored):
            sampled = replace(sampled, prompts=self._score_prompt(plan, logits[len(rows) :]))
        self._sampled_at = time.perf_counter()
        return sampled

    def launch(self, plan: StepPlan, before: LaunchedStep | None) -> LaunchedStep:
        """Launch a step on the device, and its sampling too if sampling needs no data of the host.

        Otherwise sample on the host before returning; then all earlier steps must be committed. A
        plan with `ahead` reads the tokens of `before`, the step that was launched before this one.
        """
        began = time.perf_counter()
        drawn = before.tokens if plan.ahead and before is not None else None
        self._gap_seconds = 0.0 if plan.ahead else began - self._sampled_at
        with self.computing():
            logits = self._runner.run(plan, drawn)
            rows, indices = plan.sampling_rows, self._indices(plan)
            if len(plan.scored) or not self._sampler.can_sample_on_device(rows, indices):
                sampled = self.sample(plan, logits)
                return LaunchedStep(plan, None, lambda: sampled, began)
            tokens, finite = self._sampler.sample_on_device(logits, rows, indices)
            arriving = self._streams.copy_to_host(tokens, finite)
        return LaunchedStep(plan, tokens, lambda: self._finish_launch(arriving), began)

    def computing(self) -> AbstractContextManager[object]:
        """Return a context; device work launched in it runs after all earlier engine work."""
        return self._streams.computing()

    def _finish_launch(self, arriving: AsyncTokenCopy) -> Sampled:
        tokens, finite = arriving.wait()
        self._sampled_at = time.perf_counter()
        return Sampled(tokens, finite, [None] * len(tokens))

    def _indices(self, plan: StepPlan) -> Ints:
        """Return [S] the answer index of each token to sample; earlier steps may be uncommitted."""
        rows, table = plan.sampling_rows, self.batcher.table
        lengths = plan.context_lens[plan.samples]
        if len(plan.forks):
            lengths = np.concatenate((lengths, table.num_tokens[plan.forks[:, 1]]))
        indices: Ints = lengths - table.num_prompt[rows]
        return indices

    def commit(self, plan: StepPlan, sampled: Sampled, seconds: float, result: StepResult) -> None:
        """Record the results of a step that took `seconds`, and add them to `result`."""
        rows = plan.sampling_rows
        if not sampled.finite.all():
            keys = self.batcher.table.keys[rows[~sampled.finite]].tolist()
            # Report each key once for all its choices, and only if its sequence has not ended.
            result.failed = [key for key in keys if self._live.pop(key, None) is not None]
            for key in result.failed:
                self.batcher.fail(key)
                self._beam_searches.close(key)
        for key in sampled.finished_searches:
            if (search := self._beam_searches.close(key)) is not None:
                self.batcher.finish(key)
                result.beam_results.append(BeamResult(key, search.best))
        result.output = output = self.batcher.commit(plan, sampled.tokens, sampled.parents)
        result.logprobs, result.prompts = sampled.logprobs, sampled.prompts
        if len(output.rows) < len(rows):
            of_row = dict(zip(rows.tolist(), sampled.logprobs, strict=True))
            result.logprobs = [of_row[row] for row in output.rows.tolist()]
        only_canary = self._has_canary and self._exclude_canary(plan, output)
        self.drain_events(result)
        if not only_canary:
            self._num_steps += 1
            self._step_seconds = seconds
            self._times.add(seconds, with_prompts=len(plan.tokens) > len(plan.rows))

    def _exclude_canary(self, plan: StepPlan, output: StepOutput) -> bool:
        """Subtract a canary's prompt from the totals; return True if the step ran nothing else."""
        if CANARY not in output.keys:
            self._has_canary = CANARY in self._live
            return False
        if output.indices[output.keys.index(CANARY)] == 0:
            self.batcher.exclude_from_totals(1)
        return len(plan.rows) == 1

    def drain_events(self, result: StepResult) -> None:
        """Process the scheduler's events since the last call, and add them to `result`."""
        for event in self.batcher.events():
            self._handle_event(event, result)

    def load(self) -> WorkerLoad:
        """Return the worker load, without the byte counts of KV transfers."""
        times = self._times
        return self.batcher.load()._replace(
            last_step_seconds=self._step_seconds,
            num_steps=self._num_steps,
            step_counts=times.counts(),
            step_seconds=times.seconds,
            prompt_seconds=times.prompt_seconds,
            expert_imbalance=self._expert_balance.ratio(time.perf_counter()),
        )

    @property
    def gap_seconds(self) -> float:
        """Seconds between the end of the previous step and the start of the newest step."""
        return self._gap_seconds

    @property
    def longest_step(self) -> float:
        """Decaying maximum of the recent step times, in seconds."""
        return self._times.longest

    def debug_state(self) -> dict[str, Any]:
        """Return load and scheduler state, without tokens; callable while the engine hangs."""
        return {"load": self.load()._asdict(), "scheduler": self.batcher.debug_state()}

    def warm_up(self, captured: ProgressCallback = lambda done, total: None) -> None:
        """Do one-time work, such as compiling kernels, before requests and KV transfers need it.

        On a GPU, also capture the CUDA graphs of decode steps; `captured` gets (done, total). Call
        this before the first submission, because it replaces the scheduler.
        """
        device = self._runner.decoder.device
        with self.computing():
            warm_up_block_moves(self.cache.data)
        if isinstance(self._runner, DeviceRunner):
            self._runner.capture(CudaCaptures(device), captured)
        for new in warm_up_sequences(self.limits, compiles=device.type == "cuda"):
            self.submit(new)
            while not self.step().finished:
                pass
        self.batcher = Batcher(self.limits)
        self._num_steps = 0
        self._times = StepTimes(self._times.longest)

    def _advance_beams(
        self, sampled: Sampled, candidates: Candidates, rows: Ints, logits: Tensor
    ) -> Sampled:
        """Choose the next beams of every beam search; rows: [S], logits: [S + P, V]."""
        at, table = sampled.beams, self.batcher.table
        beams, tokens, parents = rows[at], sampled.tokens, rows.copy()
        keys = table.keys[beams]
        steps = self._beam_searches.advance(keys, table.choices[beams], beams, candidates)
        tokens[at], parents[at] = steps.tokens, steps.parents
        for key in steps.finished:
            if self._beam_searches.failed(key):
                sampled.finite[at[keys == key]] = False
        live = [self._live.get(key) for key in keys]
        counts = [-1 if new is None else _num_logprobs(new.params) for new in live]
        requested = [(index, node) for index, node in steps.new_nodes if counts[index] >= 0]
        if requested:
            indices = [index for index, _ in requested]
            wanted = np.array(counts, np.int64)[indices]
            names = np.array([node.token for _, node in requested], np.int32)
            entries = self._sampler.score(logits[at[indices]], wanted, names)
            for (_, node), entry in zip(requested, entries, strict=True):
                node.logprobs = entry
        return replace(sampled, parents=parents, finished_searches=steps.finished)

    def _score_prompt(self, plan: StepPlan, logits: Tensor) -> list[PromptLogprobs]:
        """Return the logprobs of the plan's scored prompt tokens, one entry per sequence."""
        table, positions = self.batcher.table, plan.positions[plan.scored] + 1
        at = np.searchsorted(plan.query_starts, plan.scored, side="right") - 1
        rows, starts = np.unique(plan.rows[at], return_index=True)
        order = np.argsort(starts)
        rows, starts = rows[order], starts[order]
        ends = [*starts[1:].tolist(), len(plan.scored)]
        live = [self._live.get(key) for key in table.keys[rows].tolist()]
        counts = [-1 if new is None else new.params.prompt_logprobs or 0 for new in live]
        wanted = np.array(counts, np.int64).repeat(np.diff([*starts, len(plan.scored)]))
        entries = self._sampler.score(logits, wanted, table.tokens[plan.rows[at], positions])
        return [
            PromptLogprobs(new.key, int(positions[start]), entries[start:end])
            for new, start, end in zip(live, starts.tolist(), ends, strict=True)
            if new is not None
        ]

    def _handle_event(self, event: SchedulerEvent, result: StepResult) -> None:
        match event:
            case Admitted(key, row, choice):
                with self.computing():  # so that the copies run in the stream of the steps
                    self._sampler.admit(row, self._live[key].params, choice)
            case Reserved(key, have):
                stop, blocks = self._live[key].source_len, self.batcher.reserved_blocks(key)
                result.reserved.append(Receiving(key, have, stop, blocks))
            case Yielded(key, _):
                del self._live[key]
                self._beam_searches.close(key)
                result.yielded.append(event)
            case Finished(key):
                del self._live[key]
                result.finished.append(key)


def _num_logprobs(params: SamplingParams) -> int:
    return -1 if params.logprobs is None else params.logprobs
