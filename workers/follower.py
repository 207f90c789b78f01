"""A rank that leads nothing: it computes what rank 0 plans, on its share of the model."""

import time
from math import inf
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Store

from penstock.workers.config import WorkerConfig
from penstock.workers.later import Later
from penstock.workers.parallel.plans import decode
from penstock.workers.runner import Runner
from penstock.workers.scheduling.sequence import StepPlan
from penstock.workers.share import Progress, take_share
from penstock.workers.step_times import StepTimes
from penstock.workers.warm_up import warm_up_moves
from penstock.workers.watchdog import Pulse, Watchdog

if TYPE_CHECKING:
    from penstock.protos import ranks_pb2 as wire
else:
    wire = Later("penstock.protos.ranks_pb2")


class Follower:
    """Loads, and is ready when rank 0 is. ValueError or `RankLost` as for an engine."""

    def __init__(
        self,
        config: WorkerConfig,
        store: Store,
        progress: Progress,
        watchdog: Watchdog | None = None,
    ) -> None:
        name = "an order of rank 0"
        self._pulse = Pulse(name, inf) if watchdog is None else watchdog.pulse(name)
        self._times = StepTimes()
        self._doing: dict[str, Any] = {}
        if watchdog is not None:
            watchdog.about = self.describe
        share = take_share(config, progress, store)
        self._runner = Runner(share.decoder, share.cache, config.deterministic)
        warm_up_moves(share.cache.data)
        self._mover = share.mover()
        self._mover.listen(share.reporter().report)
        self._rank = config.rank
        self._orders = share.follow(store)

    def run(self) -> None:
        """Obey, one order after the other, until rank 0 ends; `RankLost` if it does not say so."""
        try:
            while message := self._orders.read():
                self._pulse.moved(self._times.longest)
                self._obey(message)
                self._pulse.rest()
        finally:
            self._mover.stop()

    def _obey(self, message: bytes) -> None:
        match decode(message):
            case StepPlan() as plan:
                self._doing = {"step": plan.describe()}
                began = time.perf_counter()
                self._runner.run(plan)
                self._times.add(time.perf_counter() - began, with_prompts=False)
            case wire.Move() as move if move.rank == self._rank:
                self._doing = {"moves_blocks": move.WhichOneof("body"), "end": move.end}
                self._mover.obey(move)

    def describe(self) -> dict[str, Any]:
        """What it works on, or did last."""
        return {"rank": self._rank, **self._doing}
