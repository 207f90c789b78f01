"""Muon: an optimizer that orthogonalizes the momentum of each matrix before applying it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from training import ddp

# Newton-Schulz coefficients of https://kellerjordan.github.io/posts/muon/
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonal(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """Return an approximation of the nearest matrix whose singular values are all 1.

    The approximation is computed by a Newton-Schulz iteration.

    Args:
        matrix: float32 [m, n].
        num_steps: number of iterations.
    """
    x: Tensor = matrix / (matrix.norm() + 1e-7)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(num_steps):
        gram = wide @ wide.T
        polynomial = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)
        wide = torch.addmm(wide, polynomial, wide, beta=_A)
    return wide if x.shape[0] <= x.shape[1] else wide.T


class Muon:
    """Muon optimizer for the matrices inside the layers.

    `torch.optim.Muon` is not used, because it orthogonalizes in bfloat16, and CPUs without AVX-512
    only emulate bfloat16.
    """

    def __init__(self, weights: Iterable[nn.Parameter], momentum: float, decay: float) -> None:
        self._weights = list(weights)
        self._velocity = [torch.zeros_like(weight) for weight in self._weights]
        self._momentum = momentum
        self._decay = decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the weights with the learning rate `rate`, and clear the gradients."""
        updates = [torch.zeros_like(weight) for weight in self._weights]
        # Each process computes the updates of some of the matrices. The sum over all processes then
        # has all updates.
        for index in range(ddp.rank(), len(updates), ddp.size()):
            updates[index] = self._update(index)
        ddp.all_reduce_(updates)
        for weight, update in zip(self._weights, updates, strict=True):
            scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
            weight.mul_(1 - rate * self._decay)
            weight.add_(update, alpha=-rate * scale)
            weight.grad = None

    def _update(self, index: int) -> Tensor:
        weight, velocity = self._weights[index], self._velocity[index]
        if weight.grad is None:
            return torch.zeros_like(weight)
        velocity.lerp_(weight.grad, 1 - self._momentum)
        return orthogonal(weight.grad.lerp(velocity, self._momentum))
