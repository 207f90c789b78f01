"""A rank that leads nothing: it computes what rank 0 plans, on its share of the model."""

import torch
from torch._C._distributed_c10d import Store

from penstock.workers.config import WorkerConfig
from penstock.workers.parallel.blocks import move
from penstock.workers.parallel.plans import MoveBlocks, decode
from penstock.workers.runner import Runner
from penstock.workers.scheduling.sequence import StepPlan
from penstock.workers.share import Progress, take_share


class Follower:
    """Loads, and is ready when rank 0 is. ValueError or `RankLost` as for an engine."""

    def __init__(self, config: WorkerConfig, store: Store, progress: Progress) -> None:
        share = take_share(config, progress, store)
        assert share.line is not None
        self._runner = Runner(share.decoder, share.cache, config.deterministic)
        self._staging, self._line = share.staging(), share.line
        self._rank = config.rank
        self._orders = share.follow(store)

    def run(self) -> None:
        """Obey, one order after the other, until rank 0 ends; `RankLost` if it does not say so."""
        while message := self._orders.read():
            match decode(message):
                case StepPlan() as plan:
                    self._runner.run(plan)
                case MoveBlocks(rank) as order if rank == self._rank:
                    with torch.inference_mode():
                        move(order, self._staging, self._line)
