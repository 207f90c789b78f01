"""Runs models without a native implementation through `transformers`, with our KV cache.

This works for every decoder of `transformers` that uses the attention interface (see `attention`)
and passes the checks of `probe`. It is slower than the native decoder, because operations are not
fused.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.workers.layers.attention import StepInputs
from penstock.workers.models.deepseek import LatentSpec
from penstock.workers.models.rope_config import RopeSpec
from penstock.workers.models.rotary_embedding import Rotary
from penstock.workers.models.transformers_backend.attention import (
    PagedAttention,
    use_handler,
)
from penstock.workers.models.transformers_backend.probe import (
    RecordingAttention,
    Unsupported,
)


@dataclass(frozen=True, slots=True)
class TransformersModelInfo:
    """Sizes of a `transformers` model for the engine; the fields are those of `ModelSpec`."""

    family: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    eos_tokens: tuple[int, ...]
    windows: tuple[int, ...]
    rope: RopeSpec = RopeSpec(1.0)  # noqa: RUF009 (frozen); unused: the model applies its own rope

    latent: LatentSpec | None = None

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        return 2, self.num_kv_heads, self.head_dim


class _StubBody(nn.Module):
    """Replaces a model's body (tokens to hidden states), so that the head can run alone."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.kind: type[Any] = dict  # type of the body's result; set in the body's first run
        self.hidden: Tensor | None = None
        # kept in a list, so that `nn.Module` does not register the body as a submodule
        self._body = [body]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the body; other modules read its embeddings, for example."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("_body")[0], name)

    def forward(self, *args: Any, **options: Any) -> Any:
        if self.hidden is not None:
            return self.kind(last_hidden_state=self.hidden[None])
        found = self._body[0](*args, **options)
        self.kind = type(found)
        return found


def _body_of(model: Any) -> tuple[str, Any]:
    """Return name and module of the model's body, which computes hidden states from tokens."""
    from transformers import PreTrainedModel

    decoder = model.get_decoder()
    if decoder is model or not isinstance(
        decoder, PreTrainedModel
    ):  # `get_decoder` of some models returns the module of the head
        decoder = model.base_model
    for name, module in model.named_modules():
        found = module is not model if decoder is model else module is decoder
        if found and isinstance(module, PreTrainedModel):
            return name, module
    raise Unsupported("the model's layers and its head are in one module: expected two modules")


class TransformersModel:
    """A model of `transformers` with the interface of `Decoder`."""

    rotaries: tuple[Rotary, ...] = ()

    def __init__(self, model: Any) -> None:
        self._model = model
        name, self._body = _body_of(model)
        self._stub = _StubBody(self._body)
        model.set_submodule(name, self._stub)
        self.spec: TransformersModelInfo
        parameter = next(self._body.parameters())
        self.dtype: torch.dtype = parameter.dtype
        self.device: torch.device = parameter.device

    def __call__(self, tokens: Tensor, step: StepInputs, cache: Tensor) -> Tensor:
        """Run a step as in `Decoder.__call__`, but return hidden states after the final norm."""
        with use_handler(PagedAttention(step, cache, self.spec.windows)):
            return self.hidden(tokens, step.positions)

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        found = self._body(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, return_dict=True
        )
        hidden: Tensor = found.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Run the head: map hidden states [S, hidden_size] to logits [S, vocab_size] float32."""
        self._stub.hidden = hidden
        tokens = torch.zeros(len(hidden), dtype=torch.int64, device=self.device)
        try:
            with use_handler(
                RecordingAttention(0, check_masks=False)
            ):  # a handler is needed because some models create masks before they call the body
                return self.whole(tokens)
        finally:
            self._stub.hidden = None

    def whole(self, tokens: Tensor, **options: Any) -> Tensor:
        found = self._model(input_ids=tokens[None], use_cache=False, return_dict=True, **options)
        logits: Tensor = found.logits[0]
        return logits.to(torch.float32)
