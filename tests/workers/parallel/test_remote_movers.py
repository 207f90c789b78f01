"""What the other ranks of a worker say of the blocks that they move."""

from datetime import timedelta
from typing import Any, cast

import torch

from penstock.protos import ranks_pb2 as wire
from penstock.workers.parallel.communicator import Communicator
from penstock.workers.parallel.remote_movers import Reporter


class Sent:
    """A send that ends when it is waited for: by an error if the leading rank is gone."""

    def __init__(self, gone: bool) -> None:
        self._gone = gone

    def wait(self, timeout: timedelta) -> None:
        if self._gone:
            raise RuntimeError(f"Timed out waiting {timeout} for send operation to complete")


class Hosts:
    """The communicator; from `stays` messages on the leading rank is gone."""

    def __init__(self, stays: int) -> None:
        self.sizes: list[int] = []
        self.waits = 0
        self._stays = stays

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        assert rank == 0
        self.sizes.append(tensors[0].nbytes)
        self.waits += len(self.sizes) // 2 > self._stays
        return Sent(len(self.sizes) // 2 > self._stays)


def test_a_leading_rank_that_is_gone_is_waited_for_once() -> None:
    hosts = Hosts(stays=2)
    reporter = Reporter(cast(Communicator, hosts), seconds=60.0)
    for epoch in range(1, 9):
        reporter.report(wire.Report(settled=epoch))
    # Two arrived, the third did not, which the fourth found out; the others were not tried.
    assert len(hosts.sizes) == 2 * 3
