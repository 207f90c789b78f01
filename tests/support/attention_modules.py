"""Stand-ins for `flashinfer` and `flash_attn_interface`: same signatures, computed with torch.

The documentation and the sources of the real functions state requirements. The stand-ins refuse
arguments that violate these requirements.
"""

from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.support.simulated_device import in_graph

MULTIPROCESSORS = 148
"""Number of multiprocessors of the simulated GPU."""


def attend_paged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    window_left: int,
    scale: float,
    cap: float,
) -> Tensor:
    """Return causal attention [t, Hq, D] of the last t positions over keys and values [c, H, D]."""
    num_tokens, num_heads, _ = query.shape
    context, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    keys, values = (each.float().repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("thd,chd->htc", query.float(), keys) * scale
    if cap:
        scores = cap * (scores / cap).tanh()
    own = torch.arange(context - num_tokens, context)[:, None]
    other = torch.arange(context)
    seen = other <= own
    if window_left >= 0:
        seen &= other >= own - window_left
    probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("htc,chd->thd", probs, values).to(query.dtype)


def _int32(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32
        assert tensor.stride(-1) == 1 or tensor.numel() <= 1


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: Any = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """Stand-in for the function of FlashAttention-3 with a paged cache and ragged queries."""
    pages, size, num_kv_heads, head_dim = k_cache.shape
    assert v_cache.shape == k_cache.shape
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert q.shape[1] % num_kv_heads == 0
    assert q.shape[2] == head_dim
    assert causal
    _int32(cache_seqlens, page_table, cu_seqlens_q)
    assert len(cu_seqlens_q) == len(cache_seqlens) + 1 == len(page_table) + 1
    assert max_seqlen_q is not None
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(cache_seqlens.max()) <= page_table.shape[1] * size
    assert window_size[1] == (0 if window_size[0] >= 0 else -1)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for row, context in enumerate(cache_seqlens.tolist()):
        used = page_table[row, : -(-context // size)].long()
        assert int(used.max()) < pages
        keys, values = (side[used].flatten(0, 1)[:context] for side in (k_cache, v_cache))
        tokens = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
        scale = softmax_scale or head_dim**-0.5
        out[tokens] = attend_paged(q[tokens], keys, values, window_size[0], scale, softcap)
    return out


class _Wrapper:
    """Base of the stand-ins for FlashInfer's two wrappers."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self.workspace_bytes = len(float_workspace_buffer)
        self.planned: dict[str, Any] | None = None

    def set_plan(
        self, lists: tuple[Tensor, Tensor, Tensor], sizes: tuple[int, ...], options: dict[str, Any]
    ) -> None:
        assert not in_graph(), "plan cannot be used in a CUDA graph"
        starts, pages, last = lists
        _int32(*lists)
        assert all(each.device.type == "cpu" for each in lists)
        assert int(starts[-1]) == len(pages)
        assert int(last.min()) >= 1
        assert int(last.max()) <= sizes[3]
        self.planned = {"sizes": sizes, **options}

    def check_workspace(self, query_lens: Tensor, sizes: tuple[int, ...], captured: bool) -> None:
        """Raise an error if the workspace is too small for FlashInfer's `PrefillPlan`."""
        num_heads, num_kv_heads, head_dim, _ = sizes
        group, num_sequences = num_heads // num_kv_heads, len(query_lens)
        mean = int(query_lens.sum()) * group // num_sequences
        tile_rows = 128 if mean > 64 and head_dim < 256 else 64 if mean > 16 else 16
        most_if_split = 2 * MULTIPROCESSORS // num_kv_heads
        num_tiles = int((query_lens * group / tile_rows).ceil().sum())
        if captured:
            bound = -(-int(query_lens.sum()) * group // tile_rows) + num_sequences - 1
            num_tiles = max(most_if_split, bound)
        else:
            num_tiles = most_if_split if num_tiles < most_if_split else 0
        needed = num_heads * num_tiles * tile_rows * (head_dim + 1) * 4
        if needed > self.workspace_bytes:
            raise RuntimeError(f"Failed to allocate memory for batch_prefill_tmp_v: {needed} bytes")

    def attend(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        query_starts: Tensor,
        lists: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        assert self.planned is not None
        planned, (starts, pages, last) = self.planned, lists
        num_heads, num_kv_heads, head_dim, size = planned["sizes"]
        assert q.shape[1:] == (num_heads, head_dim)
        assert q.dtype == planned["q_data_type"]
        assert q.stride(-1) == 1
        for side in paged_kv_cache:
            assert side.shape[1:] == (num_kv_heads, size, head_dim)
            assert side.dtype == planned["kv_data_type"]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for row in range(len(last)):
            used = pages[int(starts[row]) : int(starts[row + 1])].long()
            context = (len(used) - 1) * size + int(last[row])
            keys, values = (
                side[used].transpose(1, 2).flatten(0, 1)[:context] for side in paged_kv_cache
            )
            tokens = slice(int(query_starts[row]), int(query_starts[row + 1]))
            out[tokens] = attend_paged(
                q[tokens],
                keys,
                values,
                planned["window_left"],
                planned["sm_scale"],
                planned["logits_soft_cap"] or 0.0,
            )
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """Stand-in for paged decode: one token per sequence; a CUDA graph must use fixed buffers."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert use_cuda_graph
        self.use_tensor_cores = use_tensor_cores
        assert paged_kv_indptr_buffer is not None
        assert paged_kv_indices_buffer is not None
        assert paged_kv_last_page_len_buffer is not None
        assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self.buffers = (
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        if len(last_page_len) != len(self.buffers[2]):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(indices) > len(self.buffers[1]):
            raise ValueError("The size of indices should be less than or equal to the buffer")
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        if self.use_tensor_cores:
            query_lens = torch.ones(len(last_page_len), dtype=torch.int32)
            self.check_workspace(query_lens, sizes, captured=True)
        options = {
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "sm_scale": sm_scale,
        }
        lists = (indptr, indices, last_page_len)
        self.set_plan(lists, sizes, options)
        for buffer, values in zip(self.buffers, lists, strict=True):
            buffer[: len(values)] = values

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        return self.attend(q, paged_kv_cache, torch.arange(len(q) + 1), self.buffers)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Stand-in for paged prefill: several tokens per sequence, without CUDA graphs."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.given: Any = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        assert causal
        _int32(qo_indptr)
        options = {
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "sm_scale": sm_scale,
        }
        lists = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.check_workspace(qo_indptr.diff(), sizes, captured=False)
        self.set_plan(lists, sizes, options)
        self.given = qo_indptr.clone(), tuple(each.clone() for each in lists)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        return self.attend(q, paged_kv_cache, *self.given)


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for member, value in members.items():
        setattr(module, member, value)
    return module


def fake_modules() -> dict[str, ModuleType]:
    """Return the stand-ins, by the names of the modules."""
    return {
        "flashinfer": _module(
            "flashinfer",
            BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
            BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        ),
        "flash_attn_interface": _module(
            "flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache
        ),
    }
