"""Loads models with `transformers`, and refuses those that cannot run with our KV cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.common.rope_scaling import yarn_positions
from penstock.workers.models.config import BadCheckpoint, Fields
from penstock.workers.models.spec import require_transformers, supported_architectures
from penstock.workers.models.transformers_backend.attention import NAME, register, use_handler
from penstock.workers.models.transformers_backend.model import (
    TransformersModel,
    TransformersModelInfo,
)
from penstock.workers.models.transformers_backend.probe import (
    AttentionCall,
    RecordingAttention,
    Unsupported,
    probe_model,
)

_TEXT_MODELS = {"Llama4ForConditionalGeneration": "Llama4ForCausalLM"}
"""Multimodal architectures whose text part `transformers` loads as another architecture."""


def load_transformers_model(
    config: Fields,
    eos_tokens: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None,
    num_bytes: int,
    progress: Callable[[int, int], None],
) -> tuple[TransformersModelInfo, TransformersModel]:
    """Load the checkpoint of `config` with `transformers`; code in the checkpoint is never run.

    Args:
        num_bytes: size of the weights, for `progress`.

    Raises:
        BadCheckpoint: if the weights are incomplete.
        UnsupportedModel: if the model is not supported by `transformers` or by `probe`.
    """
    require_transformers(config)
    folder, architecture = config.path.parent, config.values["architectures"][0]
    try:
        theirs = _their_config(architecture, folder)
        longest = _positions(theirs, max_model_len, _yarn_positions(config))
        progress(0, num_bytes)
        model = TransformersModel(_load(folder, dtype).to(device).eval())
        progress(num_bytes, num_bytes)
        with torch.inference_mode():
            model.spec = _probe(model, theirs, longest, eos_tokens, architecture)
    except Unsupported as reason:
        raise config.unsupported(
            f"{architecture} is not supported: {reason}; {supported_architectures()}"
        ) from None
    return model.spec, model


def _their_config(architecture: str, folder: Path) -> Any:
    """Return the model's `transformers` configuration.

    Raise `Unsupported` if `transformers` has no such decoder, or the decoder does not use the
    attention interface.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        found = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        kind = transformers.AutoModelForCausalLM._model_mapping.get(type(found), None)
    except Exception as error:  # invalid files can raise any exception in `transformers`
        raise Unsupported(
            f"it has no native implementation, and transformers reports: {_first_line(error)}"
        ) from None
    if kind is None:
        raise Unsupported(f"transformers has no causal language model for a {type(found).__name__}")
    if kind.__name__ != _TEXT_MODELS.get(architecture, architecture):
        raise Unsupported(
            f"transformers would load this configuration as another architecture, {kind.__name__}"
        )
    if found.is_encoder_decoder:
        raise Unsupported("the model has an encoder, and only decoders are supported")
    if kind._is_stateful and not _only_attends(found):
        raise Unsupported(
            "the model keeps other state than keys and values between tokens, which is not "
            "supported"
        )
    if not kind._supports_attention_backend:
        raise Unsupported("the model's code does not use the attention interface of transformers")
    return found.get_text_config(decoder=True)  # for text-only models, this returns `found` itself


def _only_attends(theirs: Any) -> bool:
    """Return whether all layers are attention layers, although the model sets `_is_stateful`."""
    kinds = getattr(theirs, "layer_types", None) or [None]
    return set(kinds) <= {"attention", "full_attention", "sliding_attention"}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _yarn_positions(config: Fields) -> int:
    """Return the context length with YaRN, or 0 if the model does not use YaRN."""
    # `theirs` has default values in place of those that `config.json` lacks.
    inner = config.values.get("text_config")
    return yarn_positions({**config.values, **(inner if isinstance(inner, dict) else {})})


def _positions(theirs: Any, max_model_len: int | None, yarn: int) -> int:
    """Return the maximum number of positions of a sequence.

    `yarn` is the number of positions to which YaRN extends the model, or 0.

    Raise `Unsupported` if a sequence's rotary embedding would depend on the longest sequence in
    the batch.
    """
    longest = getattr(theirs, "max_position_embeddings", None)
    if type(longest) is not int or longest < 4:
        raise Unsupported(
            f"max_position_embeddings is {longest!r:.40}: expected a whole number of 4 or more"
        )
    longest = max(longest, yarn)
    used = min(longest, max_model_len or longest)
    ropes = getattr(theirs, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
        original = rope.get("original_max_position_embeddings") or longest
        if rope.get("rope_type") == "longrope" and used > original:
            raise Unsupported(
                f"with rope_type longrope, the rotary embedding beyond {original} positions would "
                "depend on the longest sequence of a batch: set max_model_len to "
                f"{original} or less"
            )
    return used


def _load(folder: Path, dtype: torch.dtype) -> Any:
    import transformers

    register()
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=NAME,
            # Run experts one by one, because the alternative (grouped GEMMs) does not support all
            # shapes.
            experts_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # invalid files can raise any exception in `transformers`
        raise Unsupported(f"transformers cannot load the model: {_first_line(error)}") from None
    # `transformers` fills missing and mismatched weights with random values
    kinds = {"missing_keys": "are missing", "mismatched_keys": "have another shape than expected"}
    for kind, fault in kinds.items():
        if report[kind]:
            name = sorted(map(str, report[kind]))[0]
            raise BadCheckpoint(
                f"{folder}: tensors of the weights {fault}, such as {name}: the files are "
                "incomplete or do not belong together; download the checkpoint again"
            )
    return model


def _probe(
    model: TransformersModel, theirs: Any, longest: int, eos_tokens: tuple[int, ...], name: str
) -> TransformersModelInfo:
    try:
        kept = _layers_kept(theirs)
        calls = probe_model(model.hidden, theirs.num_hidden_layers, longest, model.device)
        _check_windows(calls, kept, longest)
        vocab_size = _check_head(model)
    except Unsupported:
        raise
    except Exception as error:  # with our attention, the model's code can raise any exception
        raise Unsupported(
            f"the model's code fails with Penstock's attention: {_first_line(error)}"
        ) from None
    return _spec(calls, longest, eos_tokens, name, vocab_size)


_CACHE_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
"""Supported layers of a `DynamicCache`. A dummy layer stores nothing; its model layer reads the
keys and values of another layer."""


def _layers_kept(theirs: Any) -> list[Any]:
    """Return the layers of the model's own cache; raise `Unsupported` for state other than KV."""
    from transformers import DynamicCache

    layers: list[Any] = DynamicCache(config=theirs).layers
    for layer in layers:
        if type(layer).__name__ not in _CACHE_LAYERS:
            raise Unsupported(
                f"the model's cache has layers of type {type(layer).__name__}: expected "
                f"{', '.join(_CACHE_LAYERS)}"
            )
    return layers


def _check_windows(calls: list[AttentionCall], kept: list[Any], longest: int) -> None:
    """Raise `Unsupported` if a layer has different windows in the model's own cache and masks."""
    for layer, call in zip(kept, calls, strict=True):
        window = getattr(layer, "sliding_window", 0)
        if window != call.window and 0 < window < longest:
            raise Unsupported(
                f"a layer's cache has a window of {window} positions, but its mask has a window "
                f"of {call.window} (0: no window): expected equal windows"
            )


def _check_head(model: TransformersModel) -> int:
    """Return the vocabulary size; raise `Unsupported` if the head needs more than hidden states."""
    tokens = torch.arange(3, 6, device=model.device)
    with use_handler(RecordingAttention(0, check_masks=False)):
        expected = model.whole(tokens, position_ids=tokens[None])
        found = model.logits(model.hidden(tokens, tokens))
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
        raise Unsupported("the model's logits depend on more than its last hidden states")
    return found.shape[1]


def _spec(
    calls: list[AttentionCall],
    longest: int,
    eos_tokens: tuple[int, ...],
    name: str,
    vocab_size: int,
) -> TransformersModelInfo:
    return TransformersModelInfo(
        family=name,
        vocab_size=vocab_size,
        num_layers=len(calls),
        num_kv_heads=max(call.num_kv_heads for call in calls),
        head_dim=max(call.head_dim for call in calls),
        max_model_len=longest,
        eos_tokens=eos_tokens,
        windows=tuple(call.window for call in calls),
    )
