"""Plans the Triton kernels of paged attention: work items and tiles chosen for the batch.

Work items are made on the host from the lengths of the step (`attention/work_items`) and copied to
the device without waiting for the copy. A captured CUDA graph reads the work items from buffers of
fixed sizes. `TiledPlanner.prepare` fills these buffers before each replay, so that one graph is
valid for all context lengths. See `attention/triton` for the letters of shapes.

With `one_path`, results are batch-invariant: all tiles have one size, partitions are cut at fixed
positions and merged in order, and multiply-adds are not fused.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.attention import work_items
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.attention.triton_configs import (
    Tiles,
    batch_invariant_tiles,
    chunk_tiles,
    split_kv_tiles,
)
from penstock.kernels.attention.triton_launch import (
    AttentionCall,
    Batch,
    DeviceWork,
    Layout,
    Prefix,
)
from penstock.kernels.attention.work_items import (
    StepWork,
    WorkShape,
    decode_capacity,
    make_step_work,
    shared_prefix_items,
)
from penstock.kernels.triton_common.launch import DeviceInfo, device_info, power_of_2

Ints: TypeAlias = npt.NDArray[np.integer]

RESIDENT_WARPS = 8
"""Warps of an attention kernel that a multiprocessor can run at the same time (checked by
`make aot`). This number determines the number of programs of the persistent grid."""

CHUNK_WAVES = 2
"""Number of programs of split chunks, divided by the number of programs that can run at the same
time. With a ratio of 1, the last few programs would often have to run in a second wave."""


class Lengths(NamedTuple):
    """Offsets and lengths of a batch, on the host."""

    query_starts: Ints  # [B + 1] first query row of each sequence, then the number of query rows
    context_lens: Ints  # [B] length of each sequence, including this step's tokens


@dataclass(frozen=True, slots=True)
class TiledPlan:
    """Plan of one step for the Triton kernels, for all layers with the same window."""

    batch: Batch
    lengths: Lengths
    window: int = 0
    # Length of the shared prefix, a multiple of SPLIT; 0 unless every sequence has one query token.
    # With ALiBi slopes, it is not used.
    prefix: int = 0
    one_path: bool = False  # True: results are batch-invariant; this requires `prefix` = 0
    # longest context of all steps of the CUDA graph that captures this step; 0 if there is no graph
    max_context: int = 0
    # (query heads, KV heads, features of a query, prefix) -> layout
    layouts: dict[tuple[int, int, int, int], Layout] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        query_starts: Ints,
        context_lens: Ints,
        tables: Ints,
        device: torch.device,
        window: int = 0,
        prefix: int = 0,
        one_path: bool = False,
    ) -> "TiledPlan":
        """Plan one step from arrays on the host.

        `prefix` is the number of positions that all sequences share, from position 0. It is rounded
        down to a multiple of SPLIT.
        """
        arrays = (query_starts, context_lens, tables)
        return cls(
            Batch(*(_put(np.ascontiguousarray(each, np.int32), device) for each in arrays)),
            Lengths(query_starts, context_lens),
            window,
            prefix // work_items.SPLIT * work_items.SPLIT,
            one_path,
        )

    def attend(
        self,
        query: Tensor,
        layer: Tensor,
        scores: ScoreMod,
        tail: int = 0,
    ) -> Tensor:
        """Return the attention output [T, Hq, D].

        Args:
            query: [T, Hq, D].
            layer: [2, N, H, S, W].
            scores: changes to the scores before the softmax.
            tail: for MLA, the number of features after the first D. These features only contribute
                to the score. `query` is then [T, Hq, D + tail], and `layer` is
                [1, N, 1, S, D + tail].
        """
        shape = (*query.shape[:2], query.shape[2] - tail)
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
        if not out.numel():
            return out
        # The launch for a shared prefix treats all tokens as one sequence, so its distances between
        # queries and keys are wrong. ALiBi slopes depend on these distances.
        plan = self if scores.slopes is None else replace(self, prefix=0)
        key = (query.shape[1], layer.shape[2], query.shape[2], plan.prefix)
        layout = self.layouts.get(key)
        if layout is None:
            layout = self.layouts[key] = plan._layout(query, layer, shape[2])
        AttentionCall(query, layer, scores, out, self.window, tail, self.one_path).run(
            self.batch, layout
        )
        return out

    def work(self, lengths: Lengths, shape: WorkShape) -> StepWork:
        """Return the work items of a step with these lengths, made with this plan's options."""
        return make_step_work(*lengths, self.window, self.prefix, self.one_path, shape)

    def fill(self, layout: Layout, lengths: Lengths) -> None:
        """Overwrite the device's work items of a captured step with those of the next step."""
        work = self.work(lengths, layout.shape)
        _copy(work.few, layout.work.few)
        _copy(work.worker_starts, layout.work.worker_starts)
        _copy(work.merges, layout.work.merges)

    def _layout(self, query: Tensor, layer: Tensor, head_dim: int) -> Layout:
        few, chunk = self._tiles(query, layer, is_mla=query.shape[2] > head_dim)
        shape = _work_shape(query, layer, head_dim, few, chunk)
        device = query.device
        work = self.work(self.lengths, shape)
        num_rows, merge_tokens = work.num_partial_rows, work.merge_tokens
        if self.max_context:
            limits = (len(self.lengths.context_lens), self.max_context, self.window)
            num_items, num_rows = decode_capacity(*limits, self.one_path, shape)
            merge_tokens = 1
            work = work._replace(few=_enlarged(work.few, num_items))
        prefix = self._prefix(len(query), num_rows, shape) if self.prefix else None
        arrays = (work.few, work.worker_starts, work.chunks, work.merges)
        on_device = DeviceWork(*(_put(each, device) for each in arrays))
        return Layout(shape, few, chunk, on_device, work.in_order, merge_tokens, num_rows, prefix)

    def _tiles(self, query: Tensor, layer: Tensor, is_mla: bool) -> tuple[Tiles, Tiles]:
        """Return the tile sizes for sequences with few query rows and the tile sizes for chunks."""
        chip, width = device_info(query), power_of_2(query.shape[2])
        if self.one_path:
            fixed = batch_invariant_tiles(chip, width, query.itemsize, layer.itemsize, is_mla)
            return fixed, fixed
        group = query.shape[1] // layer.shape[2]
        few = split_kv_tiles(chip, width, query.itemsize, group, layer.itemsize, is_mla)
        return few, chunk_tiles(chip, width, query.itemsize, layer.itemsize, is_mla)

    def _prefix(self, num_tokens: int, first_row: int, shape: WorkShape) -> Prefix:
        device = self.batch.tables.device
        starts = np.array([0, num_tokens], np.int32)
        batch = Batch(
            _put(starts, device),
            _put(starts[1:] + np.int32(self.prefix), device),
            self.batch.tables,
        )
        items = shared_prefix_items(num_tokens, self.prefix, first_row, shape)
        return Prefix(batch, _put(items, device), self.prefix // work_items.SPLIT)


class TiledPlanner:
    """Plans the attention of steps on a GPU, both with and without CUDA graphs.

    Captured steps with the same number of rows, longest context and window share the buffers of
    their work items.
    """

    def __init__(self, one_path: bool = False) -> None:
        """Create a planner; `one_path` makes results batch-invariant."""
        self.one_path = one_path
        self.lengths: Lengths | None = None
        self._is_captured = False
        # (rows, longest context, window) -> plan that owns the buffers of these captured steps
        self._captured: dict[tuple[int, int, int], TiledPlan] = {}

    def prepare(self, query_starts: Ints, context_lens: Ints, is_captured: bool) -> None:
        """Store the lengths of the next step, and update the work items of captured graphs.

        Args:
            query_starts: [B + 1] first query row of each sequence, then the number of query rows.
            context_lens: [B] length of each sequence, including this step's tokens.
            is_captured: True if a CUDA graph computes the step. The work items of all graphs for
                the step's number of rows are then updated.
        """
        self.lengths, self._is_captured = Lengths(query_starts, context_lens), is_captured
        if not is_captured:
            return
        for (rows, _, _), plan in self._captured.items():
            if rows == len(context_lens):
                for layout in plan.layouts.values():
                    plan.fill(layout, self.lengths)

    def plan(self, batch: Batch, max_context: int, window: int) -> TiledPlan:
        """Plan the step whose lengths were given to `prepare`.

        A step that a CUDA graph captures reuses the buffers of earlier steps with the same number
        of rows, `max_context` and `window`. `max_context` is the longest context of all steps that
        the graph will compute. The method does no work on the device.
        """
        if self.lengths is None:
            raise RuntimeError("plan() was called before prepare(): call prepare() first")
        if not self._is_captured:
            return TiledPlan(batch, self.lengths, window, one_path=self.one_path)
        key = (len(self.lengths.context_lens), max_context, window)
        plan = TiledPlan(
            batch, self.lengths, window, one_path=self.one_path, max_context=max_context
        )
        kept = self._captured.setdefault(key, plan)
        return replace(plan, layouts=kept.layouts)


def _work_shape(query: Tensor, layer: Tensor, head_dim: int, few: Tiles, chunk: Tiles) -> WorkShape:
    chip, num_heads, num_kv_heads = device_info(query), query.shape[1], layer.shape[2]
    return WorkShape(
        num_kv_heads,
        num_heads // num_kv_heads,
        few.rows,
        chunk.rows,
        _num_programs(chip, few),
        CHUNK_WAVES * _num_programs(chip, chunk),
        num_heads * head_dim * 4,
    )


def _num_programs(chip: DeviceInfo, tiles: Tiles) -> int:
    """Return the number of programs that the device can run at the same time."""
    return chip.multiprocessors * max(1, RESIDENT_WARPS // tiles.num_warps)


def _pinned(array: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    # torch does not reuse pinned memory until the device has read it.
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _put(array: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for the copy."""
    return _pinned(array, device).to(device, non_blocking=True)


def _copy(array: npt.NDArray[np.int32], target: Tensor) -> None:
    """Copy an array to the first rows of a tensor on the device without waiting for the copy."""
    target[: len(array)].copy_(_pinned(array, target.device), non_blocking=True)


def _enlarged(items: npt.NDArray[np.int32], size: int) -> npt.NDArray[np.int32]:
    found = np.zeros((size, items.shape[1]), np.int32)
    found[: len(items)] = items
    return found
