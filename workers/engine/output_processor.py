"""Commits the steps of an engine: records tokens, finished and failed sequences, and step times."""

from penstock.workers.engine.executor import Executor
from penstock.workers.engine.results import BeamResult, StepResult
from penstock.workers.engine.step_times import StepTimes
from penstock.workers.health.canary import KEY as CANARY
from penstock.workers.sampling.beam_search import BeamSearches
from penstock.workers.sampling.sampler import Sampled
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.sequence import (
    Admitted,
    Finished,
    Ints,
    Key,
    NewSequence,
    Preempted,
    Reserved,
    SchedulerEvent,
    StepOutput,
    StepPlan,
    Yielded,
)
from penstock.workers.scheduling.step_work import step_work


class OutputProcessor:
    """Turns sampled tokens and scheduler events into step results.

    Args:
        batcher: the batcher of the steps.
        executor: gets the sampling parameters of admitted sequences.
        searches: the running beam searches.
        times: statistics of the step times.
    """

    def __init__(
        self, batcher: Batcher, executor: Executor, searches: BeamSearches, times: StepTimes
    ) -> None:
        self.times = times
        self._batcher = batcher
        self._executor = executor
        self._searches = searches
        self._live: dict[Key, NewSequence] = {}  # sequences that have not ended or yielded
        self._has_canary = False  # whether `_live` may contain a canary

    def add(self, new: NewSequence) -> None:
        """Register a sequence that the batcher has accepted; its output will be processed."""
        self._live[new.key] = new
        self._has_canary |= new.key == CANARY
        if new.params.use_beam_search:
            limit = self._batcher.limits.max_model_len - new.num_prompt
            self._searches.open(new.key, new.params, limit)

    def remove(self, key: Key) -> None:
        """Unregister a sequence that has no more output; ignore an unknown key."""
        self._searches.close(key)
        self._live.pop(key, None)

    def commit(self, plan: StepPlan, sampled: Sampled, seconds: float, result: StepResult) -> None:
        """Record the results of a step that took `seconds`, and add them to `result`."""
        rows, totals = plan.sampling_rows, self._batcher.state.totals
        num_computed = totals.computed
        if not sampled.finite.all():
            self._fail(rows[~sampled.finite], result)
        for key in sampled.finished_searches:
            if (search := self._searches.close(key)) is not None:
                self._batcher.finish(key)
                result.beam_results.append(BeamResult(key, search.best))
        result.output = output = self._batcher.commit(
            plan, sampled.tokens, sampled.beam_rows, sampled.forced
        )
        result.logprobs, result.prompts = sampled.logprobs, sampled.prompts
        if sampled.forced or len(output.rows) < len(rows):
            of_row = dict(zip(rows.tolist(), sampled.logprobs, strict=True))
            # Only the first token of each row was sampled. The forced tokens that follow it have no
            # logprobs and get None.
            result.logprobs = [of_row.pop(row, None) for row in output.rows.tolist()]
        only_canary = self._has_canary and self._exclude_canary(plan, output)
        self.drain_events(result)
        if not only_canary:
            self.times.add(seconds, with_prompts=len(plan.tokens) > len(plan.rows))
            num_generated = self._num_generated(sampled, output)
            self.times.add_tokens(totals.computed - num_computed + num_generated)
            self.times.record(step_work(plan))
            self._batcher.state.budget.record(plan, seconds)

    def drain_events(self, result: StepResult) -> None:
        """Process the scheduler's events since the last call, and add them to `result`."""
        for event in self._batcher.events():
            self._handle_event(event, result)

    def _fail(self, rows: Ints, result: StepResult) -> None:
        """End the sequences of rows without valid logits, with all choices of each sequence."""
        for key in self._batcher.table.keys[rows].tolist():
            # Report each key once for all its choices, and only if its sequence has not ended.
            if self._live.pop(key, None) is not None:
                self._batcher.fail(key)
                self._searches.close(key)
                result.failed.append(key)

    def _num_generated(self, sampled: Sampled, output: StepOutput) -> int:
        """Return the number of generated tokens of answers and beams, without a canary's."""
        beams = sampled.beam_rows
        canary = output.keys.count(CANARY) if self._has_canary else 0
        return len(output.tokens) + (0 if beams is None else len(beams.rows)) - canary

    def _exclude_canary(self, plan: StepPlan, output: StepOutput) -> bool:
        """Subtract a canary's prompt from the totals; return True if only the canary ran."""
        if CANARY not in output.keys:
            self._has_canary = CANARY in self._live
            return False
        if output.indices[output.keys.index(CANARY)] == 0:
            self._batcher.exclude_from_totals(1)
        return len(plan.rows) == 1

    def _handle_event(self, event: SchedulerEvent, result: StepResult) -> None:
        match event:
            case Admitted(key, row, choice, num_cached):
                new = self._live[key]
                self._executor.admit(row, new.params, choice, new.grammar)
                result.num_cached.setdefault(key, num_cached)
            case Reserved():
                result.reserved.append(event)
            case Yielded(key, _):
                self.remove(key)
                result.yielded.append(event)
            case Preempted(key):
                result.preempted.append(key)
            case Finished(key):
                self.remove(key)
                result.finished.append(key)
