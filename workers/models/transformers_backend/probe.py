"""Looking a model of `transformers` over before it is served.

Configurations say what they mean in a hundred ways; what a model does with its attention can be
seen. It runs on a few tokens with an attention that only writes down how it was called. What the
paged cache cannot honour is refused by name, so that nothing is silently left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.workers.models.transformers_backend.attention import (
    IGNORED_OPTIONS,
    Qkv,
    score_mod_of,
    use_handler,
)

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.1}


class Unsupported(Exception):
    """Why a model cannot be served, as the end of a sentence that begins with its name."""


@dataclass(frozen=True, slots=True)
class MaskProbe:
    """The mask that was asked for: positions that a token sees, itself included; 0: all."""

    window: int

    def __getattr__(self, name: str) -> object:
        """Whoever looks for what a tensor has wants to compute with it."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported("it computes with attention masks by itself")

    def __getitem__(self, index: object) -> object:
        raise Unsupported("it computes with attention masks by itself")


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """How one layer called its attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # the wider of keys and values
    window: int


@dataclass(slots=True)
class RecordingAttention:
    """An attention in which no token sees another: it gives what the token itself brings."""

    max_model_len: int
    check_masks: bool  # they can only be read while one token runs
    calls: dict[int, AttentionCall] = field(default_factory=dict)

    def mask(self, options: dict[str, Any]) -> object:
        return MaskProbe(read_window(options, self.max_model_len)) if self.check_masks else None

    def attend(self, module: Any, heads: Qkv, mask: object, options: dict[str, Any]) -> Tensor:
        if self.check_masks:
            self._record(module, heads, mask, options)
        # With the query and the keys, so that positions show. Bounded: no layer may drown another.
        group = heads.query.shape[1] // heads.keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (heads.keys, heads.values))
        mixed = (heads.query + keys).tanh().mean(-1, keepdim=True)
        return values + mixed * heads.query.tanh().mean(-1, keepdim=True) + mixed

    def _record(self, module: Any, heads: Qkv, mask: object, options: dict[str, Any]) -> None:
        layer = getattr(module, "layer_idx", None)
        if type(layer) is not int or layer in self.calls:
            raise Unsupported("its layers do not attend once each")
        window = _window_of(module, mask, options)
        check_options(module, options)
        score_mod_of(options, heads.query)
        num_heads, num_kv_heads = heads.query.shape[1], heads.keys.shape[1]
        if heads.values.shape[1] != num_kv_heads or num_heads % num_kv_heads:
            raise Unsupported(f"layer {layer} has {num_heads} heads over {num_kv_heads} KV heads")
        head_dim = max(heads.keys.shape[2], heads.values.shape[2])
        self.calls[layer] = AttentionCall(num_heads, num_kv_heads, head_dim, window)


def _window_of(module: Any, mask: object, options: dict[str, Any]) -> int:
    window = options.get("sliding_window")
    if mask is None:
        return int(window or 0)
    if not isinstance(mask, MaskProbe):
        raise Unsupported("it makes attention masks of its own")
    if window and mask.window not in (0, window):
        raise Unsupported(f"a layer has two windows, {mask.window} and {window}")
    return mask.window


def check_options(module: Any, options: dict[str, Any]) -> None:
    """`Unsupported` for whatever a layer asks of its attention that is not honoured."""
    known = {"scaling", "softcap", "s_aux", "sliding_window", "dropout", "is_causal"}
    for name, value in options.items():
        if name not in known | IGNORED_OPTIONS and value is not None and value is not False:
            raise Unsupported(f"it passes {name} to its attention")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise Unsupported("its attention is not causal")
    if options.get("dropout"):
        raise Unsupported("its attention drops out")
    if getattr(module, "sinks", None) is not None and options.get("s_aux") is None:
        raise Unsupported("it has attention sinks that it does not pass on")


def read_window(options: dict[str, Any], max_model_len: int) -> int:
    """The window of a mask, from the function that tells which positions see which.

    `Unsupported` where that is neither causal nor a causal window, in `max_model_len` positions.
    """
    from transformers.masking_utils import sdpa_mask

    def row_of(position: int) -> Tensor:
        row = sdpa_mask(
            batch_size=1,
            q_length=1,
            kv_length=max_model_len,
            q_offset=position,
            mask_function=options["mask_function"],
            allow_is_causal_skip=False,
            use_vmap=options.get("use_vmap", False),
        )
        seen: Tensor = row[0, 0, 0]
        return seen

    last = max_model_len - 1
    window = int(row_of(last).sum())
    positions = torch.arange(max_model_len)
    for position in {0, 1, window - 1, window, window + 1, last // 2, last - 1, last}:
        if 0 <= position <= last:
            expected = (positions <= position) & (positions > position - window)
            if not torch.equal(row_of(position), expected):
                raise Unsupported("its masks are neither causal nor sliding windows")
    return window if window < max_model_len else 0


Run = Callable[[Tensor, Tensor], Tensor]
"""Tokens [T] and positions [T] to hidden states [T, hidden_size]."""


def probe_model(
    run: Run, num_layers: int, max_model_len: int, device: torch.device
) -> list[AttentionCall]:
    """How each layer attends; `Unsupported` where the paged cache and the batcher cannot serve it.

    Three tokens run alone and then side by side, first as tokens of three sequences do, then as
    those of one. If that changes anything, they meet elsewhere than in attention (in a
    convolution, a recurrence, ...), or the model counts positions by itself.
    """
    last = max_model_len - 1
    for positions in ([last, 0, last // 2], [last - 2, last - 1, last]):
        calls = _probe_at(run, torch.tensor(positions, device=device), max_model_len)
    return check_layers(calls, num_layers)


def _probe_at(run: Run, positions: Tensor, max_model_len: int) -> dict[int, AttentionCall]:
    tokens = torch.arange(3, 6, device=positions.device)
    unbatched = []
    for one in range(3):
        recorder = RecordingAttention(max_model_len, check_masks=True)
        with use_handler(recorder):
            unbatched.append(run(tokens[one : one + 1], positions[one : one + 1]))
    with use_handler(RecordingAttention(max_model_len, check_masks=False)):
        together = run(tokens, positions)
    difference = (torch.cat(unbatched) - together).abs().max()
    if not difference <= _TOLERANCE[together.dtype] * together.abs().max():
        raise Unsupported(
            "its tokens meet outside of attention (as in a convolution or a recurrence), or it "
            "does not take their positions as given"
        )
    return recorder.calls


def check_layers(calls: dict[int, AttentionCall], num_layers: int) -> list[AttentionCall]:
    """The calls in the order of the layers; `Unsupported` where they fit no common cache."""
    if sorted(calls) != list(range(num_layers)):
        raise Unsupported(f"{len(calls)} of its {num_layers} layers attend through the interface")
    found = [calls[layer] for layer in range(num_layers)]
    most = max(call.num_kv_heads for call in found)
    for layer, call in enumerate(found):  # fewer KV heads are repeated, see `Paged`
        if most % call.num_kv_heads or call.num_heads % most:
            raise Unsupported(
                f"layer {layer} has {call.num_heads} heads over {call.num_kv_heads} KV heads where "
                f"another has {most} KV heads, which are no multiple or no divisor of these"
            )
    return found
