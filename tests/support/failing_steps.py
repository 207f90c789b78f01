"""A stub worker whose requests fail after some tokens."""

from collections.abc import Sequence

import pytest

from penstock.protos import worker_pb2 as pb
from tests.support.stub_worker import Run, StubWorker


def fail_after(worker: StubWorker, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all requests of a worker fail with "out of memory" after `num_tokens` tokens."""
    make_step = worker._make_step

    def fail_or_make_step(runs: Sequence[Run]) -> None:
        if all(run.position < num_tokens for run in runs):
            make_step(runs)
            return
        step = pb.Step()
        for request, attempt in worker.runs:
            step.ended.add(request=request, attempt=attempt, reason="out of memory")
        worker.runs.clear()
        worker.send(pb.ToRouter(step=step))

    monkeypatch.setattr(worker, "_make_step", fail_or_make_step)
