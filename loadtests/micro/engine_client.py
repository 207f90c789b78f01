"""Calls the engine directly in this process, as a baseline for `penstock serve`."""

import time
from collections.abc import Sequence
from pathlib import Path

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.bench.metrics import Outcome
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.scheduling.sequence import NewSequence


class EngineClient:
    """An engine configured as in a worker, but called without router, gRPC stream or Ray."""

    def __init__(self, model: Path, threads: int) -> None:
        self._engine = Engine(WorkerConfig(name="direct", model=model, threads=threads))
        self._engine.warm_up()

    @property
    def vocab_size(self) -> int:
        return self._engine.spec.vocab_size

    def prefill(self, prompt: list[int]) -> float:
        """Return the seconds from submitting a prompt (token ids) until its first answer token."""
        return self.run([prompt], 1)[0].ttft

    def run(self, prompts: Sequence[list[int]], output_len: int) -> list[Outcome]:
        """Run all prompts in one batch, greedily, with `output_len` answer tokens each."""
        params = SamplingParams(temperature=0.0, max_tokens=output_len)
        origin = time.perf_counter()
        outcomes = [Outcome(n, 0.0, len(prompt), output_len) for n, prompt in enumerate(prompts)]
        for number, prompt in enumerate(prompts):
            self._engine.submit(NewSequence(number, prompt, len(prompt), params))
        left = len(outcomes)
        while left:
            result = self._engine.step()
            now = time.perf_counter() - origin
            for key in result.output.keys if result.output else ():
                outcome = outcomes[int(str(key))]
                outcome.arrivals.append(now)
                outcome.counts.append(1)
                outcome.output_len += 1
            for key in result.failed:
                outcomes[int(str(key))].error = "the model's output was not finite"
            left -= len(result.finished) + len(result.failed)
        return outcomes
