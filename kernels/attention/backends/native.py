"""Penstock's own attention, as an attention backend."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.attention.backends.interface import AttentionRequest, HostBatch
from penstock.kernels.attention.op import AttentionPlan, plan_attention_on_device
from penstock.kernels.attention.triton_launch import Batch


@dataclass(frozen=True, slots=True)
class NativeBackend:
    """Our kernels. Everything is planned on the device, so `prepare` does nothing."""

    name: str
    batch_invariant: bool = False

    @classmethod
    def of(cls, request: AttentionRequest) -> "NativeBackend":
        return cls("triton" if request.device == "cuda" else "cpu", request.deterministic)

    def prepare(self, batch: HostBatch) -> None:
        pass

    def plan(
        self,
        batch: Batch,
        layer: Tensor,
        max_query: int,
        max_context: int,
        window: int,
    ) -> AttentionPlan:
        return plan_attention_on_device(
            *batch, layer, max_query, max_context, window, self.batch_invariant
        )
