"""Statistics of the inputs of a model's linear layers, for GPTQ and AWQ."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class Inputs:
    """Sums of one layer's inputs x [K] over all calibration tokens."""

    products: Tensor  # sum of x xᵀ, [K, K] float64
    sums: Tensor  # sum of |x|, [K] float64
    count: int = 0

    @staticmethod
    def none(size: int) -> "Inputs":
        return Inputs(torch.zeros(size, size, dtype=torch.float64), torch.zeros(size).double())

    def add(self, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).double()
        self.products += rows.T @ rows
        self.sums += rows.abs().sum(0)
        self.count += len(rows)

    @property
    def hessian(self) -> Tensor:
        """Mean of x xᵀ over the calibration tokens, [K, K]."""
        return self.products / max(self.count, 1)

    @property
    def magnitudes(self) -> Tensor:
        """Mean of |x| over the calibration tokens, [K] float32."""
        return (self.sums / max(self.count, 1)).float()


@torch.inference_mode()
def collect_inputs(folder: Path, sequences: Sequence[Sequence[int]]) -> dict[str, Inputs]:
    """Run a model on token sequences in `transformers` and return each module's input statistics.

    The LM head is left out.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    found: dict[str, Inputs] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            found[name] = Inputs.none(module.in_features)
            module.register_forward_pre_hook(partial(_record, found[name]))
    for tokens in sequences:
        model(torch.tensor([list(tokens)]))
    return found


def _record(inputs: Inputs, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    inputs.add(arguments[0])
