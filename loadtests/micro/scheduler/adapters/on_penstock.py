"""Adapter for Penstock's batcher and block pool."""

import time
from typing import Any

import numpy as np

import penstock
from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.micro.scheduler.adapters.host import DRAWN
from penstock.loadtests.micro.scheduler.cells import BLOCK_SIZE
from penstock.workers.scheduling.batcher import Batcher, SchedulerConfig
from penstock.workers.scheduling.sequence import Finished, NewSequence


class Adapter:
    """Penstock's scheduler for one cell. The module `host` specifies the methods."""

    def __init__(self, cell: dict[str, Any]) -> None:
        self._batcher = Batcher(
            SchedulerConfig(
                num_blocks=cell["num_blocks"],
                max_model_len=cell["max_model_len"],
                block_size=BLOCK_SIZE,
                max_sequences=cell["max_sequences"],
                max_batched_tokens=cell["max_batched_tokens"],
                max_queued=1 << 30,
                watermark=0,  # as in vLLM
            )
        )
        self._submitted = 0
        self._left = 0

    @property
    def preempted(self) -> int:
        return self._batcher.load().preemptions

    def submit(self, prompts: list[list[int]], output_len: int) -> int:
        began = time.thread_time_ns()
        for number, prompt in enumerate(prompts, start=self._submitted):
            params = SamplingParams(temperature=0.0, max_tokens=output_len, stop_token_ids=(2,))
            self._batcher.submit(NewSequence(number, prompt, len(prompt), params))
        spent = time.thread_time_ns() - began
        self._submitted += len(prompts)
        self._left += len(prompts)
        return spent

    def step(self) -> tuple[int, int, int]:
        began = time.thread_time_ns()
        plan = self._batcher.plan()
        planned = time.thread_time_ns() - began
        assert plan is not None, "no step to compute before the cell is complete"
        drawn = np.full(np.count_nonzero(plan.samples), DRAWN, np.int32)
        began = time.thread_time_ns()
        self._batcher.commit(plan, drawn)
        events = self._batcher.events()
        spent = planned + time.thread_time_ns() - began
        self._left -= sum(isinstance(event, Finished) for event in events)
        return spent, len(plan.tokens), self._left


def start() -> tuple[type[Adapter], dict[str, Any]]:
    return Adapter, {"name": "Penstock", "version": penstock.__version__}
