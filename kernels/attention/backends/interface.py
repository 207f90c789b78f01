"""The interface of attention backends on a GPU, and the model properties that backends check.

A backend computes `paged_attention` for all steps on a GPU. Two methods prepare a step. `prepare`
gets the lengths on the host, and is never part of a CUDA graph. `plan` gets tensors on the device,
and may be called while a graph is captured. Before a replay of a graph, only `prepare` is called.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.kernels.attention.op import AttentionPlan
from penstock.kernels.attention.triton_launch import Batch

Ints: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """Properties of a model and a device, from which a backend decides if it supports the pair."""

    device: str  # "cuda" or "cpu"
    capability: tuple[int, int]  # compute capability of an NVIDIA GPU; (0, 0) for other devices
    multiprocessors: int  # number of multiprocessors of a GPU; 0 for other devices
    dtype: str  # dtype of queries, for example "bfloat16"
    cached: str  # dtype of the KV cache, for example "bfloat16"
    num_heads: int  # query heads of this rank
    num_kv_heads: int
    head_dim: int
    block_size: int
    captured_rows: int  # largest number of rows of a CUDA graph
    windows: tuple[int, ...]  # sliding windows of the layers; 0 for a layer without a window
    scale: float | None  # factor of the scores; None means 1 / sqrt(head_dim)
    cap: float = 0.0  # soft cap of the scores; 0 if there is none
    has_sinks: bool = False
    has_alibi: bool = False
    is_latent: bool = False  # True if the model uses MLA
    is_native: bool = True  # False if the model runs through the code of `transformers`
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The lengths and blocks of a step with B sequences, on the host."""

    query_starts: Ints  # [B + 1] first query row of each sequence, then the number of query rows
    context_lens: Ints  # [B] length of each sequence, including this step's tokens
    block_tables: Ints  # [B, M] block numbers; entries past a sequence's blocks are undefined
    # True if a CUDA graph computes the step; each of the B sequences then has one query token.
    # The first step of a graph is the captured one. No later step has a wider block table.
    is_captured: bool = False


class AttentionBackend(Protocol):
    """Prepares and computes attention for the steps of one model runner."""

    @property
    def name(self) -> str:
        """Name of the backend in log messages."""
        ...

    @property
    def grids_follow_context(self) -> bool:
        """Whether the grids of a captured graph grow with the longest context of the graph.

        If so, a graph that was captured for long contexts is slow when it computes short contexts.
        """
        ...

    def prepare(self, batch: HostBatch) -> None:
        """Do the host's work for the next step.

        This call is also necessary if the step is a replay of a CUDA graph.
        """
        ...

    def plan(
        self,
        batch: Batch,
        layer: Tensor,
        max_query: int,
        max_context: int,
        window: int,
    ) -> AttentionPlan:
        """Plan the prepared step for all layers with this window.

        `max_query` is the largest number of query tokens of a sequence. The other arguments are
        those of `plan_attention_on_device`. The method may launch kernels, but must not do other
        work, so that a graph can capture it.
        """
        ...


def common_reason(request: AttentionRequest) -> str:
    """Return the reason why no external backend can support `request`.

    The result is "" if there is no such reason; each backend must then check its own conditions.
    """
    if request.device != "cuda":
        return "it needs a CUDA device"
    if request.deterministic:
        return "its results for a token depend on the batch, which deterministic mode forbids"
    if not request.is_native:
        return "it does not support models that run through transformers"
    if request.is_latent:
        return "it is not used for multi-head latent attention"
    if request.dtype not in ("bfloat16", "float16"):
        return f"it needs bfloat16 or float16, not {request.dtype}"
    if request.cached != request.dtype:
        return f"its KV cache would need the dtype {request.dtype}, not {request.cached}"
    if request.has_sinks:
        return "it does not support attention sinks"
    if request.has_alibi:
        return "it does not support ALiBi with the model's slopes"
    return ""
