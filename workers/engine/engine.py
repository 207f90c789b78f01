"""The engine: scheduler, model and sampler as one object.

It belongs to one thread; `step` runs one step and says what came of it. A pipeline runs the parts
of a step itself, of which `compute` and `draw` may belong to another thread. One sequence's failure
ends that sequence only; an exception of the model ends the engine.
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
    """Blocks [n] of positions [have, stop) wait to be written by a transfer."""

    key: Key
    have: int
    stop: int
    blocks: Ints


@dataclass(frozen=True, slots=True)
class BeamResult:
    """The answers of a beam search, which is over: the best first, all of them whole."""

    key: Key
    answers: list[Hypothesis]


@dataclass(slots=True)
class StepResult:
    """What one step gave. `logprobs` has an entry for each of the output's tokens."""

    output: StepOutput | None = None  # None: there was nothing to compute
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)
    beam_results: list[BeamResult] = field(default_factory=list)
    failed: list[Key] = field(default_factory=list)  # ended: their logits were not finite
    yielded: list[Yielded] = field(default_factory=list)
    reserved: list[Receiving] = field(default_factory=list)
    finished: list[Key] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return self.output is None and not (self.yielded or self.reserved or self.finished)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that a device computes, or will."""

    plan: StepPlan
    tokens: Tensor | None  # [S] what it draws, on the device; None: only the host knows
    wait: Callable[[], Sampled]  # until its tokens are here; from any thread
    began: float  # seconds, of `perf_counter`


class Engine:
    """One model on one device, or on several, of which this process leads one: the others follow
    (`Follower`), having met it in `store`.

    `progress` is told of the weights while they load, `tell` of stages by their names; `decoder` is
    a model that is there already.
    Where the engine cannot be, a ValueError says why in one line.
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
        self._plan_writer = runtime.connect_as_leader(store)  # to the other ranks, if there are any
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
        self._in_flight: deque[StepPlan] = deque()  # that the other ranks were told of
        self._live: dict[Key, NewSequence] = {}  # all but leases
        self._beam_searches = BeamSearches()
        self._has_canary = False  # a canary is among the live
        self._step_seconds = 0.0
        self._times = StepTimes()
        self._num_steps = 0
        self._sampled_at = time.perf_counter()
        self._gap_seconds = 0.0

    # ------------------------------------------------------------ commands

    def submit(self, new: NewSequence) -> None:
        """Queue a sequence. Raises NeverFits or QueueFull if it is refused."""
        self.batcher.submit(new)
        self._live[new.key] = new
        if new.params.use_beam_search:
            self._beam_searches.open(
                new.key, new.params, self.limits.max_model_len - new.num_prompt
            )

    def submit_canary(self) -> None:
        """Queue a canary; QueueFull if it is not taken."""
        self.submit(make_canary())
        self._has_canary = True

    def drop_choice(self, key: Key, choice: int) -> None:
        """Let go of one of its choices; unknown: nothing."""
        self.batcher.drop_choice(key, choice)

    def drop(self, key: Key) -> None:
        """Let go of it, in whatever form it is held; unknown: nothing."""
        self.batcher.drop(key)
        self._beam_searches.close(key)
        self._live.pop(key, None)

    def request_yield(self, key: Key) -> None:
        """Stop it at the next step boundary and keep its blocks; unknown: nothing."""
        self.batcher.request_yield(key)

    # ------------------------------------------------------------ steps

    def step(self) -> StepResult:
        """Plan, compute and book one step, if there is anything to compute."""
        started = time.perf_counter()
        result = StepResult()
        # Of a pipeline as many as it has stages, so that each of them has one to compute.
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
        """What the next step computes; None if there is nothing to compute."""
        plan = self.batcher.plan(time.perf_counter())
        self.drain_events(result)
        return plan

    def plan_ahead(self) -> StepPlan | None:
        """What the step after the one that computes will compute; None if that must end first."""
        return self.batcher.plan(time.perf_counter())

    def compute(self, plan: StepPlan) -> Tensor:
        """Run the model; the logits [S + P, vocab_size] of the rows that draw, and of the prompt
        tokens that are scored."""
        if not any(plan is each for each in self._in_flight):
            self._broadcast(plan)
        self._gap_seconds = time.perf_counter() - self._sampled_at
        return self._runner.run(plan)

    def _broadcast(self, plan: StepPlan) -> None:
        """Have the other ranks compute it too."""
        if self._plan_writer is not None:
            self._plan_writer.write(encode(plan))

    def stop(self) -> None:
        """The other ranks may end. After the last step."""
        if self._plan_writer is not None:
            self._plan_writer.end()

    def sample(self, plan: StepPlan, logits: Tensor) -> Sampled:
        """Draw the tokens, once every step before is booked."""
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
        """Compute and draw, as far as that needs nobody to wait.

        before: the step launched before, whose tokens a plan made ahead goes on from: they are not
        None. What is drawn with the answer so far in sight is drawn before this returns, and wants
        every step before to be booked.
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
        """Within, what is launched on a device computes after what the engine launched before."""
        return self._streams.computing()

    def _finish_launch(self, arriving: AsyncTokenCopy) -> Sampled:
        tokens, finite = arriving.wait()
        self._sampled_at = time.perf_counter()
        return Sampled(tokens, finite, [None] * len(tokens))

    def _indices(self, plan: StepPlan) -> Ints:
        """[S] of the tokens to draw in their answers; the steps before need not be booked."""
        rows, table = plan.sampling_rows, self.batcher.table
        lengths = plan.context_lens[plan.samples]
        if len(plan.forks):
            lengths = np.concatenate((lengths, table.num_tokens[plan.forks[:, 1]]))
        indices: Ints = lengths - table.num_prompt[rows]
        return indices

    def commit(self, plan: StepPlan, sampled: Sampled, seconds: float, result: StepResult) -> None:
        """Take up what a step gave; it took `seconds`."""
        rows = plan.sampling_rows
        if not sampled.finite.all():
            keys = self.batcher.table.keys[rows[~sampled.finite]].tolist()
            # One that has ended meanwhile is in the step still; one with several choices is once.
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
        """Count its prompt nowhere; whether the step was for it alone."""
        if CANARY not in output.keys:
            self._has_canary = CANARY in self._live
            return False
        if output.indices[output.keys.index(CANARY)] == 0:
            self.batcher.exclude_from_totals(1)
        return len(plan.rows) == 1

    def drain_events(self, result: StepResult) -> None:
        """Take up what has happened in the scheduler since the last call."""
        for event in self.batcher.events():
            self._handle_event(event, result)

    def load(self) -> WorkerLoad:
        """The worker's load, without the bytes that transfers have moved."""
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
        """From the newest step's begin back to the end of the one before."""
        return self._gap_seconds

    @property
    def longest_step(self) -> float:
        """Seconds that a step took of late, at most."""
        return self._times.longest

    def debug_state(self) -> dict[str, Any]:
        """What is known of its work, but for what is said in it; also while it hangs."""
        return {"load": self.load()._asdict(), "scheduler": self.batcher.debug_state()}

    def warm_up(self, captured: ProgressCallback = lambda done, total: None) -> None:
        """Run what `warm_up` has, so that no request, and no KV transfer, pays for what is made
        once.

        On a GPU, capture the decodes first; `captured` is told how many are, and of how many.
        Only before the first submission: the scheduler starts afresh.
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
        """Let every search choose among its candidates; rows: [S], logits: [S + P, V]."""
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
        """Logprobs of prompt tokens; those of one row stand together."""
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
                with self.computing():  # where what is brought to the device is read
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
