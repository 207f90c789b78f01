"""A follower: a rank other than 0, which executes rank 0's step plans on its model shard."""

import threading
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.workers.config import WorkerConfig
from penstock.workers.engine.step_times import StepTimes
from penstock.workers.engine.warm_up import warm_up_block_moves
from penstock.workers.gpu.device_runner import capture_graphs
from penstock.workers.gpu.streams import Streams
from penstock.workers.health.watchdog import ProgressTimer, Watchdog
from penstock.workers.parallel.collectives import RankLost
from penstock.workers.parallel.lazy_module import LazyModule
from penstock.workers.parallel.step_codec import decode
from penstock.workers.rank.rank_runtime import ProgressCallback, load_rank
from penstock.workers.scheduling.sequence import StepPlan

if TYPE_CHECKING:
    from penstock.protos import ranks_pb2 as wire
else:
    wire = LazyModule("penstock.protos.ranks_pb2")


WARM_UP_LIMIT = timedelta(days=1)  # longer than the supervisor's time limit for a worker's start

SERVING_KEY = "serving"
"""Key that rank 0 sets in the rendezvous store once its warm-up has ended."""


class Follower:
    """A rank other than 0. The constructor loads the rank's shard and connects to rank 0.

    Raises:
        ValueError: The configuration is invalid or not supported here.
        RankLost: Another rank failed or did not connect.
    """

    def __init__(
        self,
        config: WorkerConfig,
        store: Store,
        progress: ProgressCallback,
        watchdog: Watchdog | None = None,
    ) -> None:
        name = "a message from rank 0"
        self._timer = ProgressTimer(name, inf) if watchdog is None else watchdog.timer(name)
        # Set after the warm-up; from then on, the watchdog may check the times of steps.
        # Steps of the warm-up are slow, because kernels are compiled and NCCL connects.
        self._is_checked = threading.Event()
        self._times = StepTimes()
        self._current_work: dict[str, Any] = {}
        if watchdog is not None:
            watchdog.state_source = self.debug_state
        runtime = load_rank(config, progress, store)
        self._runner = runtime.runner()
        self._streams = Streams(runtime.decoder.device)
        with self._streams.computing():
            warm_up_block_moves(runtime.cache.data)
        self._mover = runtime.mover()
        self._mover.listen(runtime.reporter().report)
        self._rank = config.rank
        self._orders = runtime.connect_as_follower(store)
        if watchdog is not None:
            threading.Thread(target=self._await_warm_up, args=(store,), daemon=True).start()

    def run(self) -> None:
        """Execute messages until rank 0 sends the end marker; raise `RankLost` if rank 0 fails."""
        try:
            while message := self._orders.read():
                if self._is_checked.is_set():
                    self._timer.progressed(self._times.longest)
                with self._streams.computing():
                    self._execute(message)
                self._timer.idle()
        finally:
            self._mover.stop()

    def _await_warm_up(self, store: Store) -> None:
        with suppress(RankLost):  # ignore this error, because `run` fails too if rank 0 is lost
            store.wait([SERVING_KEY], WARM_UP_LIMIT)
            self._is_checked.set()

    def _execute(self, message: bytes) -> None:
        match decode(message):
            case StepPlan() as plan:
                self._current_work = {"step": plan.describe()}
                began = time.perf_counter()
                self._runner.run(plan, self._drawn(plan))
                # all ranks compute the prompt logits together
                deque(self._runner.prompt_logits(), maxlen=0)
                self._times.add(time.perf_counter() - began, with_prompts=False)
            case wire.Capture():
                self._current_work = {"captures": "CUDA graphs"}
                capture_graphs(self._runner, lambda done, total: None)
            case wire.Move() as move if move.rank == self._rank:
                self._current_work = {"moves_blocks": move.WhichOneof("body"), "end": move.end}
                self._mover.execute(move)

    @torch.inference_mode()
    def _drawn(self, plan: StepPlan) -> Tensor | None:
        """Receive the tokens of a step planned ahead, [T]; None if the plan has its tokens."""
        if not plan.ahead:
            return None
        shape, device = plan.tokens.shape, self._runner.decoder.device
        return self._runner.broadcast_tokens(torch.empty(shape, dtype=torch.int32, device=device))

    def debug_state(self) -> dict[str, Any]:
        """Return a description of the current or last work, for crash dumps."""
        return {"rank": self._rank, **self._current_work}
