"""A rank that leads nothing: it computes what rank 0 plans, on its share of the model."""

from torch._C._distributed_c10d import Store

from penstock.workers.config import WorkerConfig
from penstock.workers.parallel.plans import decode
from penstock.workers.runner import Runner
from penstock.workers.share import Progress, take_share


class Follower:
    """Loads, and is ready when rank 0 is. ValueError or `RankLost` as for an engine."""

    def __init__(self, config: WorkerConfig, store: Store, progress: Progress) -> None:
        share = take_share(config, progress, store)
        self._runner = Runner(share.decoder, share.cache)
        self._plans = share.follow(store)

    def run(self) -> None:
        """Compute one step after the other, until rank 0 ends; `RankLost` if it does not say so."""
        while message := self._plans.read():
            self._runner.run(decode(message))
