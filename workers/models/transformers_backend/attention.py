"""The attention interface of `transformers`, with ours behind it.

Its models look their attention up by name, in a table of functions, and likewise what makes their
masks. Ours are registered under `NAME`; they hand every call to the `AttentionHandler` that is set
for the moment. There are two: `Paged`, which computes a step, and the one that looks a model over.
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
from penstock.kernels.kv_cache.op import write_kv
from penstock.workers.layers.attention import StepInputs

NAME = "penstock"

IGNORED_OPTIONS = {
    *("position_ids", "cache_position", "past_key_values", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"),
}
"""What models pass along that says nothing of how to attend."""


class AttentionHandler(Protocol):
    """What the registered functions do for now."""

    def mask(self, options: dict[str, Any]) -> object: ...

    def attend(self, module: Any, heads: "Qkv", mask: object, options: dict[str, Any]) -> Tensor:
        """Returns [T, Hq, D of the values]."""
        ...


@dataclass(frozen=True, slots=True)
class Qkv:
    """What a layer attends with: [T, heads, D] each; the values' D may be another."""

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
    """Makes `NAME` an attention that models of `transformers` can be told to use."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(**options: Any) -> object:
    return _handler.get().mask(options)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, None]:
    """query: [1, Hq, T, D]; returns [1, T, Hq, D]."""
    heads = Qkv(*(x[0].transpose(0, 1) for x in (query, key, value)))
    return _handler.get().attend(module, heads, attention_mask, options)[None], None


def score_mod_of(options: dict[str, Any], query: Tensor) -> ScoreMod:
    """How a call wants its scores made."""
    scale, sinks = options.get("scaling"), options.get("s_aux")
    return ScoreMod(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        cap=float(options.get("softcap") or 0.0),
        sinks=sinks,
    )


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """One step over the paged cache."""

    step: StepInputs
    cache: Tensor  # [layers, 2, N, H, S, D]
    windows: tuple[int, ...]  # of each layer, known from when the model was looked over

    def mask(self, options: dict[str, Any]) -> object:
        return None  # the step's plans say it all

    def attend(self, module: Any, heads: Qkv, mask: object, options: dict[str, Any]) -> Tensor:
        layer = self.cache[module.layer_idx]
        query = self._widened(heads.query)
        keys, values = (self._widened(self._repeated(x)) for x in (heads.keys, heads.values))
        write_kv(layer, self.step.cache_rows, torch.cat((keys, values), dim=1))
        plan = self.step.plans[self.windows[module.layer_idx]]
        out = paged_attention(query, layer, plan, score_mod_of(options, heads.query))
        return out[..., : heads.values.shape[-1]]

    def _repeated(self, heads: Tensor) -> Tensor:
        """A layer of fewer KV heads than others: each stands for several, as in its own groups."""
        times = self.cache.shape[3] // heads.shape[1]
        return heads if times == 1 else heads.repeat_interleave(times, dim=1)

    def _widened(self, heads: Tensor) -> Tensor:
        """Narrower keys or values get zeros, which change no product."""
        missing = self.cache.shape[-1] - heads.shape[-1]
        return functional.pad(heads, (0, missing)) if missing else heads.contiguous()
