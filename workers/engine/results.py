"""Results of a step, as the engine reports them to the worker's service."""

from dataclasses import dataclass, field

from penstock.workers.sampling.beam_search import Hypothesis
from penstock.workers.sampling.sampler import PromptLogprobs, TokenLogprobs
from penstock.workers.scheduling.cache_report import CacheReport
from penstock.workers.scheduling.sequence import Key, Reserved, StepOutput, Yielded


@dataclass(frozen=True, slots=True)
class BeamResult:
    """The complete answers of a finished beam search, best first."""

    key: Key
    answers: list[Hypothesis]


@dataclass(slots=True)
class StepResult:
    """Result of one step. `logprobs` has one entry per token of `output`."""

    output: StepOutput | None = None  # new tokens; None if there was nothing to compute
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)
    beam_results: list[BeamResult] = field(default_factory=list)
    # keys of sequences that ended because their logits were not finite or no token was allowed
    failed: list[Key] = field(default_factory=list)
    yielded: list[Yielded] = field(default_factory=list)
    reserved: list[Reserved] = field(default_factory=list)
    finished: list[Key] = field(default_factory=list)
    # number of cached prompt tokens of each admitted sequence
    num_cached: dict[Key, int] = field(default_factory=dict)
    # key of the preempted sequence, for each preemption
    preempted: list[Key] = field(default_factory=list)
    # Report of stored and evicted blocks. The engine's thread sets it before it passes the result
    # to the event loop.
    cache: CacheReport | None = None

    @property
    def empty(self) -> bool:
        events = (self.yielded, self.reserved, self.finished, self.num_cached, self.preempted)
        return self.output is None and not any(events)
