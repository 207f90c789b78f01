"""Communicators are created with the options that their purpose needs."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from penstock.workers.parallel.communicator import PAIR_CHANNELS, connect


class FakeNccl:
    """Stand-in for `ProcessGroupNCCL`, which torch has only with CUDA."""

    Options = staticmethod(lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=None)))

    def __init__(self, store: Any, rank: int, num_ranks: int, options: Any) -> None:
        self.options = options


@pytest.mark.parametrize(("few_channels", "expected"), [(True, PAIR_CHANNELS), (False, None)])
def test_only_pairs_of_workers_limit_the_channels_of_nccl(
    monkeypatch: pytest.MonkeyPatch, few_channels: bool, expected: int | None
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    found: Any = connect("nccl", HashStore(), 0, 2, "127.0.0.1", 5.0, few_channels)
    assert found.options._timeout == timedelta(seconds=5.0)
    assert found.options.config.max_ctas == expected
