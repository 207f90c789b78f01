"""Interfaces through which the engine uses a model, native or run by `transformers`."""

from typing import Protocol

import torch
from torch import Tensor

from penstock.workers.layers.attention import StepInputs
from penstock.workers.models.deepseek import LatentSpec
from penstock.workers.models.rope_config import RopeSpec
from penstock.workers.models.rotary_embedding import Rotary


class ModelInfo(Protocol):
    """Sizes of a model. See `ModelSpec` for the meaning of the properties."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def kv_shape(self) -> tuple[int, int, int]: ...
    @property
    def latent(self) -> LatentSpec | None: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_tokens(self) -> tuple[int, ...]: ...
    @property
    def windows(self) -> tuple[int, ...]: ...
    @property
    def rope(self) -> RopeSpec: ...


class Model(Protocol):
    """A model that can run steps. See `Decoder` for the meaning of the members."""

    @property
    def spec(self) -> ModelInfo: ...
    @property
    def rotaries(self) -> tuple[Rotary, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def __call__(self, tokens: Tensor, step: StepInputs, cache: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
