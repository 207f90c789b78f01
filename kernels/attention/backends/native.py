"""Penstock's own attention, as an attention backend."""

from torch import Tensor

from penstock.kernels.attention.backends.interface import AttentionRequest, HostBatch
from penstock.kernels.attention.op import AttentionPlan, plan_attention_on_device
from penstock.kernels.attention.triton_launch import Batch
from penstock.kernels.attention.triton_plan import TiledPlanner


class NativeBackend:
    """Runs Penstock's Triton attention kernels. For each step, the host plans their work items."""

    grids_follow_context = False

    def __init__(self, name: str, batch_invariant: bool = False) -> None:
        self.name = name
        self.batch_invariant = batch_invariant
        self._planner = TiledPlanner(batch_invariant)

    @classmethod
    def of(cls, request: AttentionRequest) -> "NativeBackend":
        return cls("triton" if request.device == "cuda" else "cpu", request.deterministic)

    def prepare(self, batch: HostBatch) -> None:
        self._planner.prepare(batch.query_starts, batch.context_lens, batch.is_captured)

    def plan(
        self,
        batch: Batch,
        layer: Tensor,
        max_query: int,
        max_context: int,
        window: int,
    ) -> AttentionPlan:
        return plan_attention_on_device(*batch, layer, self._planner, max_context, window)
