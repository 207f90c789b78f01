"""Examines a model of `transformers` before it is served.

Configurations describe attention in many ways, so the model itself is observed: it runs on a few
tokens with an attention function that records its arguments. If the model passes an option that the
paged cache does not support, an error names the option. No option is silently ignored.
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
    """The model cannot be served. The message completes "ARCHITECTURE is not supported: "."""


@dataclass(frozen=True, slots=True)
class MaskProbe:
    """Placeholder for a mask tensor; `window` is the number of visible positions (0: all)."""

    window: int

    def __getattr__(self, name: str) -> object:
        """Raise `Unsupported`: a model that reads attributes of a mask uses it in computations."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported(
            "the model's code reads or changes its attention masks: expected code that passes "
            "them unchanged to the attention function"
        )

    def __getitem__(self, index: object) -> object:
        raise Unsupported(
            "the model's code reads or changes its attention masks: expected code that passes "
            "them unchanged to the attention function"
        )


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Parameters with which one layer called its attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # head size of keys or of values, whichever is larger
    window: int


@dataclass(slots=True)
class RecordingAttention:
    """Handler that records attention calls; each token attends only to itself."""

    max_model_len: int
    # whether masks are checked and calls recorded; only possible in runs of a single token
    check_masks: bool
    calls: dict[int, AttentionCall] = field(default_factory=dict)

    def mask(self, options: dict[str, Any]) -> object:
        return MaskProbe(read_window(options, self.max_model_len)) if self.check_masks else None

    def attend(self, module: Any, heads: Qkv, mask: object, options: dict[str, Any]) -> Tensor:
        if self.check_masks:
            self._record(module, heads, mask, options)
        # Add terms of query and keys to the values, so that wrong positions change the result.
        # `tanh` bounds these terms, so that no layer dominates the other layers.
        group = heads.query.shape[1] // heads.keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (heads.keys, heads.values))
        mixed = (heads.query + keys).tanh().mean(-1, keepdim=True)
        return values + mixed * heads.query.tanh().mean(-1, keepdim=True) + mixed

    def _record(self, module: Any, heads: Qkv, mask: object, options: dict[str, Any]) -> None:
        layer = getattr(module, "layer_idx", None)
        if type(layer) is not int:
            raise Unsupported(f"the layer_idx of a layer is {layer!r:.40}: expected a number")
        if layer in self.calls:
            raise Unsupported(
                f"layer {layer} calls the attention function more than once: expected one call"
            )
        window = _window_of(module, mask, options)
        check_options(module, options)
        score_mod_of(options, heads.query)
        num_heads, num_kv_heads = heads.query.shape[1], heads.keys.shape[1]
        if heads.values.shape[1] != num_kv_heads or num_heads % num_kv_heads:
            raise Unsupported(
                f"layer {layer} has {num_heads} query heads, {num_kv_heads} key heads and "
                f"{heads.values.shape[1]} value heads: expected equal numbers of key and value "
                "heads that divide the number of query heads"
            )
        head_dim = max(heads.keys.shape[2], heads.values.shape[2])
        self.calls[layer] = AttentionCall(num_heads, num_kv_heads, head_dim, window)


def _window_of(module: Any, mask: object, options: dict[str, Any]) -> int:
    window = options.get("sliding_window")
    if mask is None:
        return int(window or 0)
    if not isinstance(mask, MaskProbe):
        raise Unsupported(
            "the model's code makes its own attention masks: expected the masks that "
            "transformers makes"
        )
    if window and mask.window not in (0, window):
        raise Unsupported(
            f"a layer has a window of {window} positions, but its mask has a window of "
            f"{mask.window}: expected equal windows"
        )
    return mask.window


def check_options(module: Any, options: dict[str, Any]) -> None:
    """Raise `Unsupported` if a layer calls its attention with an unsupported option."""
    known = {"scaling", "softcap", "s_aux", "sliding_window", "dropout", "is_causal"}
    for name, value in options.items():
        if name not in known | IGNORED_OPTIONS and value is not None and value is not False:
            raise Unsupported(f"a layer passes the unsupported option {name} to its attention")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise Unsupported("a layer's attention is not causal: only causal attention is supported")
    if options.get("dropout"):
        raise Unsupported(f"a layer's attention has a dropout of {options['dropout']}: expected 0")
    if getattr(module, "sinks", None) is not None and options.get("s_aux") is None:
        raise Unsupported(
            "a layer has attention sinks, but does not pass them to the attention function"
        )


def read_window(options: dict[str, Any], max_model_len: int) -> int:
    """Return the sliding window of a mask function; 0 means no window.

    Raise `Unsupported` if, within `max_model_len` positions, the mask is neither causal nor a
    causal sliding window.
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
                raise Unsupported("a layer's mask is neither causal nor a causal sliding window")
    return window if window < max_model_len else 0


Run = Callable[[Tensor, Tensor], Tensor]
"""Function that maps tokens [T] and positions [T] to hidden states [T, hidden_size]."""


def probe_model(
    run: Run, num_layers: int, max_model_len: int, device: torch.device
) -> list[AttentionCall]:
    """Return each layer's attention call; raise `Unsupported` if the model cannot be served.

    In each of two rounds, the model runs three tokens one by one, and then in one batch. The first
    round has positions of three sequences, the second has consecutive positions of one sequence.
    If the results of a round differ, tokens interact outside of attention (in a convolution, a
    recurrence, ...), or the model ignores the given positions.
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
            "tokens interact outside of attention (as in a convolution or a recurrence), or the "
            "model ignores the given positions"
        )
    return recorder.calls


def check_layers(calls: dict[int, AttentionCall], num_layers: int) -> list[AttentionCall]:
    """Return the calls in layer order; raise `Unsupported` if one cache cannot hold all layers."""
    if sorted(calls) != list(range(num_layers)):
        raise Unsupported(
            f"the layers {sorted(calls)} use the attention interface: expected the layers 0 to "
            f"{num_layers - 1}"
        )
    found = [calls[layer] for layer in range(num_layers)]
    most = max(call.num_kv_heads for call in found)
    for layer, call in enumerate(found):  # `PagedAttention` repeats heads up to `most` KV heads
        if most % call.num_kv_heads or call.num_heads % most:
            raise Unsupported(
                f"layer {layer} has {call.num_heads} query heads and {call.num_kv_heads} KV heads, "
                f"but another layer has {most} KV heads: {most} must be a multiple of "
                f"{call.num_kv_heads} and a divisor of {call.num_heads}"
            )
    return found
