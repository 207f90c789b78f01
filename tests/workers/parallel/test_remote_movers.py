"""Reports of follower ranks on their KV transfer moves."""

from datetime import timedelta
from typing import Any, cast

import torch

from penstock.protos import ranks_pb2 as wire
from penstock.workers.parallel.communicator import Communicator
from penstock.workers.parallel.remote_movers import Reporter


class FakeSend:
    """A pending send; `wait` raises an error if rank 0 is gone."""

    def __init__(self, gone: bool) -> None:
        self._gone = gone

    def wait(self, timeout: timedelta) -> None:
        if self._gone:
            raise RuntimeError(f"Timed out waiting {timeout} for send operation to complete")


class FakeCommunicator:
    """A communicator to a rank 0 that is gone after `num_delivered` reports (two sends each)."""

    def __init__(self, num_delivered: int) -> None:
        self.sizes: list[int] = []
        self.waits = 0
        self._num_delivered = num_delivered

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        assert rank == 0
        self.sizes.append(tensors[0].nbytes)
        self.waits += len(self.sizes) // 2 > self._num_delivered
        return FakeSend(len(self.sizes) // 2 > self._num_delivered)


def test_reporter_waits_for_a_lost_rank_0_only_once() -> None:
    communicator = FakeCommunicator(num_delivered=2)
    reporter = Reporter(cast(Communicator, communicator), seconds=60.0)
    for epoch in range(1, 9):
        reporter.report(wire.Report(settled=epoch))
    # Two reports arrived, and the third was lost. Later reports were not sent.
    assert len(communicator.sizes) == 2 * 3
