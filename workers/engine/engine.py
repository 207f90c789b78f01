"""The engine: one model with its scheduler, executor and output processor.

All methods are called from one thread. Three objects share the work of a step: the batcher plans
the step, the executor runs the model and samples, and the output processor commits the step. A
stepper calls the three in this order; an `OverlapStepper` runs the executor on a second thread. If
a sequence fails, only that sequence ends; if the model raises an exception, the engine stops.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from penstock.common.grammar.cache import GrammarCache
from penstock.common.grammar.matcher import GrammarVocabulary
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.common.worker_load import WorkerLoad
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.executor import Executor
from penstock.workers.engine.output_processor import OutputProcessor
from penstock.workers.engine.results import StepResult
from penstock.workers.engine.step_times import StepTimes
from penstock.workers.engine.stepper import DeviceStepper, OverlapStepper, SyncStepper
from penstock.workers.engine.warm_up import warm_up_sequences
from penstock.workers.health.expert_balance import ExpertBalance
from penstock.workers.models.protocols import Model, ModelInfo
from penstock.workers.rank.core_sharing import CoreSharing, open_core_sharing
from penstock.workers.rank.fingerprint import model_fingerprint
from penstock.workers.rank.rank_runtime import ProgressCallback, load_rank
from penstock.workers.sampling.beam_search import BeamSearches
from penstock.workers.sampling.sampler import Sampler
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.cache_report import CacheReporter
from penstock.workers.scheduling.config import SchedulerConfig
from penstock.workers.scheduling.sequence import Key, NewSequence


class Engine:
    """One model on one or several ranks. This process is rank 0; other ranks run a `Follower`.

    Args:
        config: settings of the worker.
        progress: called with the number of bytes of weights that have been read, and their total.
        store: the rendezvous, if there are several ranks.
        decoder: a model that is already loaded.
        on_stage: called with the name of each start-up stage.

    Raises:
        ValueError: the engine cannot start; the message has one line.
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
        plan_writer = runtime.connect_as_leader(store)
        self.movers = runtime.movers(plan_writer)
        self.grammars = GrammarCache(partial(_grammar_vocabulary, config.model, self.spec))
        self._deferred = runtime.deferred
        self._expert_balance = ExpertBalance(runtime.expert_counts())
        self._searches = BeamSearches()
        runner, device = runtime.runner(), runtime.decoder.device
        sampler = Sampler(self.limits.max_sequences, self.spec.vocab_size, device)
        cores = _core_sharing(config) if device.type == "cpu" else None
        self.machine = cores.machine if cores is not None else ""
        self.executor = Executor(runner, sampler, self._searches, plan_writer, cores)
        ahead = self.executor.on_device if config.plan_ahead is None else config.plan_ahead
        self.plans_ahead = ahead and config.pp == 1
        self._set_scheduler(self.limits, StepTimes())

    # ------------------------------------------------------------ commands

    def submit(self, new: NewSequence) -> None:
        """Queue a sequence. Raises NeverFits or QueueFull if the sequence is refused."""
        self.batcher.submit(new)
        self.outputs.add(new)

    def drop_choice(self, key: Key, choice: int) -> None:
        """Remove one choice of a sequence; ignore an unknown key or choice."""
        self.batcher.drop_choice(key, choice)

    def drop(self, key: Key) -> None:
        """Remove a sequence in any state, or its lease; ignore an unknown key."""
        self.batcher.drop(key)
        self.outputs.remove(key)

    def request_yield(self, key: Key) -> None:
        """Stop a sequence at its next step boundary and lease its blocks; ignore an unknown key."""
        self.batcher.request_yield(key)

    def step(self) -> StepResult:
        """Plan, execute and commit one step, if there is anything to compute."""
        return self._stepper.advance()

    # ------------------------------------------------------------ state

    def load(self) -> WorkerLoad:
        """Return the worker load, without the byte counts of KV transfers."""
        times = self.outputs.times
        return self.batcher.load()._replace(
            last_step_seconds=times.last,
            num_steps=times.num_steps,
            step_counts=times.counts(),
            step_seconds=times.seconds,
            prompt_seconds=times.prompt_seconds,
            expert_imbalance=self._expert_balance.ratio(time.perf_counter()),
            step_token_counts=times.token_counts(),
            step_tokens=times.num_tokens,
        )

    def debug_state(self) -> dict[str, Any]:
        """Return the load and the scheduler's state, without tokens, even if the engine hangs."""
        return {"load": self.load()._asdict(), "scheduler": self.batcher.debug_state()}

    # ------------------------------------------------------------ start and end

    def warm_up(self, captured: ProgressCallback = lambda done, total: None) -> None:
        """Do one-time work, such as compiling kernels, before requests and KV transfers need it.

        On a GPU, also capture the CUDA graphs of decode steps; `captured` is called with the number
        of captured graphs and their total. Call this before the first submission, because the
        warm-up replaces the scheduler.
        """
        self.executor.warm_up(captured)
        for new in warm_up_sequences(self.limits, compiles=self.cache.data.device.type == "cuda"):
            self.submit(new)
            while not self.step().finished:
                pass
        self.reset_scheduler(self.limits)
        if self._deferred is not None:
            self._deferred.start()

    def reset_scheduler(self, limits: SchedulerConfig) -> None:
        """Replace the scheduler by an empty one.

        No sequence may be live, and no step may be in flight.
        """
        times = self.outputs.times
        self._set_scheduler(limits, StepTimes(times.longest, times.last))

    def idle(self) -> None:
        """Leave the cores to other workers of this machine; call this when no step is due."""
        self.executor.idle()

    def stop(self) -> None:
        """End the other ranks. Call this after the last step."""
        self.executor.stop()

    def _set_scheduler(self, limits: SchedulerConfig, times: StepTimes) -> None:
        self.batcher = Batcher(limits)
        self.cache_reporter = CacheReporter(self.batcher.pool.published)
        self.outputs = OutputProcessor(self.batcher, self.executor, self._searches, times)
        self._stepper = SyncStepper(self.batcher, self.executor, self.outputs)


def _grammar_vocabulary(folder: Path, spec: ModelInfo) -> GrammarVocabulary:
    return GrammarVocabulary(ModelTokenizer(folder), spec.vocab_size, spec.eos_tokens)


def _core_sharing(config: WorkerConfig) -> CoreSharing | None:
    """Return the core sharing of a worker on a CPU; None if not configured or not possible.

    A worker that is deterministic or has several ranks keeps its number of threads. It still marks
    itself as computing, so that the other workers use fewer threads.
    """
    if config.threads is None or config.max_threads is None:
        return None
    fixed = config.deterministic or config.coord.mesh.num_ranks > 1
    own = config.threads * config.tp
    most = own if fixed else config.max_threads
    return open_core_sharing(own, most, (lambda count: None) if fixed else torch.set_num_threads)


def make_stepper(engine: Engine, changed: threading.Condition) -> SyncStepper | OverlapStepper:
    """Return the stepper for the engine's configuration and device.

    Args:
        engine: the engine; its scheduler must not be replaced afterwards.
        changed: condition that a stepper with a second thread notifies when it has computed a step.
    """
    batcher, executor, outputs = engine.batcher, engine.executor, engine.outputs
    if not engine.plans_ahead:
        return SyncStepper(batcher, executor, outputs)
    overlap = DeviceStepper if executor.on_device else OverlapStepper
    return overlap(batcher, executor, outputs, changed)
