"""Paged attention behind the attention interface of `transformers`.

Models of `transformers` look up their attention and mask functions by name in a registry. The
functions registered as `NAME` pass every call to the current `AttentionHandler`. The handler is a
`PagedAttention`, to run a step, or a `RecordingAttention`, to examine a model (`probe`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.attention.op import paged_attention
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.kv_cache.format import num_features
from penstock.kernels.kv_cache.op import write_kv
from penstock.workers.layers.attention import StepInputs

NAME = "penstock"

IGNORED_OPTIONS = {
    *("position_ids", "cache_position", "past_key_values", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"),
}
"""Options that models pass to attention functions, but that do not change the result."""


class AttentionHandler(Protocol):
    """Interface of the objects that implement the registered attention and mask functions."""

    def mask(self, options: dict[str, Any]) -> object: ...

    def attend(self, module: Any, heads: "Qkv", mask: object, options: dict[str, Any]) -> Tensor:
        """Return the attention output [T, Hq, D], where D is the head size of the values."""
        ...


@dataclass(frozen=True, slots=True)
class Qkv:
    """Queries, keys and values of a layer, [T, heads, D] each; D of the values may differ."""

    query: Tensor
    keys: Tensor
    values: Tensor


_handler: ContextVar[AttentionHandler] = ContextVar("handler")


@contextmanager
def use_handler(handler: AttentionHandler) -> Iterator[None]:
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def register() -> None:
    """Register `NAME` as an attention implementation of `transformers`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(**options: Any) -> object:
    return _handler.get().mask(options)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, None]:
    """Call the current handler with query, key and value [1, heads, T, D]; return [1, T, Hq, D]."""
    heads = Qkv(*(x[0].transpose(0, 1) for x in (query, key, value)))
    return _handler.get().attend(module, heads, attention_mask, options)[None], None


def score_mod_of(options: dict[str, Any], query: Tensor) -> ScoreMod:
    """Return the score mod that the options of an attention call describe."""
    scale, sinks = options.get("scaling"), options.get("s_aux")
    return ScoreMod(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        cap=float(options.get("softcap") or 0.0),
        sinks=sinks,
    )


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Handler that computes the attention of one step over the paged KV cache."""

    step: StepInputs
    cache: Tensor  # [layers, 2, N, H, S, W], see `kernels/kv_cache/op.py`
    windows: tuple[int, ...]  # sliding window of each layer, as recorded by `probe`; 0: no window

    def mask(self, options: dict[str, Any]) -> object:
        return None  # no mask is needed, because the step's plans contain the masks

    def attend(self, module: Any, heads: Qkv, mask: object, options: dict[str, Any]) -> Tensor:
        layer = self.cache[module.layer_idx]
        query = self._widened(heads.query)
        keys, values = (self._widened(self._repeated(x)) for x in (heads.keys, heads.values))
        write_kv(layer, self.step.cache_rows, torch.cat((keys, values), dim=1))
        plan = self.step.plans[self.windows[module.layer_idx]]
        out = paged_attention(query, layer, plan, score_mod_of(options, heads.query))
        return out[..., : heads.values.shape[-1]]

    def _repeated(self, heads: Tensor) -> Tensor:
        """Repeat the KV heads of a layer that has fewer KV heads than the cache."""
        times = self.cache.shape[3] // heads.shape[1]
        return heads if times == 1 else heads.repeat_interleave(times, dim=1)

    def _widened(self, heads: Tensor) -> Tensor:
        """Pad `heads` with zeros to the head size of the cache; this does not change the result."""
        missing = num_features(self.cache) - heads.shape[-1]
        return functional.pad(heads, (0, missing)) if missing else heads.contiguous()
