"""The training loop: fits one model to generated batches, up to a number of steps and minutes.

The minutes are CPU time, not wall time: on a busy machine the run takes longer but gives the same
model.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from training import ddp
from training.data import PROMPT_WEIGHT, Batch, BatchMaker
from training.model import Llama
from training.muon import Muon

LONG_LENGTH = 1024
_LONG_EVERY = 4
_PRINT_EVERY = 25


@dataclass(frozen=True, slots=True)
class Recipe:
    """Duration, batch sizes and learning rates of one run."""

    steps: int
    minutes: float  # CPU time per process; ends the run early if `steps` do not fit
    seed: int = 0
    course: int = 0  # each course draws other examples
    rows: int = 6  # rows per process
    length: int = 256
    long_rows: int = 1
    long_length: int = LONG_LENGTH
    long_from: int = 350  # step
    muon_rate: float = 0.012
    adam_rate: float = 0.003
    warmup: float = 0.01  # share of the run
    cooldown: float = 0.9  # share of the run, linearly to zero at the end
    checkpoint_every: int = 600
    weights: Mapping[str, float] = field(default_factory=dict)  # by family; override their defaults


def _clocks() -> Tensor:
    """Return wall time and CPU time of this process in seconds, float64 [2]."""
    return torch.tensor([time.monotonic(), time.process_time()], dtype=torch.float64)


@dataclass(slots=True)
class Progress:
    """Cost of a run so far: wall time, and CPU time of all its processes together, in seconds."""

    step: int = 0
    tokens: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    _started: Tensor = field(default_factory=_clocks)

    def advance(self, tokens: int) -> None:
        """Count one step."""
        self.step += 1
        self.tokens += tokens
        spent = _clocks() - self._started
        # Use the sum over all processes so that they all stop at the same step.
        ddp.all_reduce_([spent])
        self.wall = spent[0].item() / ddp.size()
        self.cpu = spent[1].item()

    def done(self, recipe: Recipe) -> float:
        """Return the completed share of `recipe`, by steps or CPU minutes, whichever is larger."""
        minutes = self.cpu / ddp.size() / 60
        return max(self.step / recipe.steps, minutes / recipe.minutes)

    def __add__(self, later: Progress) -> Progress:
        """Return the progress of two consecutive runs."""
        return Progress(
            step=self.step + later.step,
            tokens=self.tokens + later.tokens,
            wall=self.wall + later.wall,
            cpu=self.cpu + later.cpu,
        )


Checkpoint = Callable[[Llama, Progress], None]
LossOf = Callable[[Llama, Batch], Tensor]


def answer_loss(model: Llama, batch: Batch) -> Tensor:
    """Return the weighted cross entropy of the next token."""
    counted = batch.weights > 0
    logits = model.logits(model(batch.tokens, batch.mask)[counted])
    losses = F.cross_entropy(logits, batch.targets[counted], reduction="none")
    return (losses * batch.weights[counted]).sum() / batch.weights.sum()


def distilled(teacher: Llama) -> LossOf:
    """Return a loss: cross entropy of each answer token against the teacher's distribution."""

    def loss(model: Llama, batch: Batch) -> Tensor:
        answers = batch.weights > PROMPT_WEIGHT
        hidden = model(batch.tokens, batch.mask)
        with torch.no_grad():
            wanted = teacher.logits(teacher(batch.tokens, batch.mask)[answers]).softmax(-1)
        return F.cross_entropy(model.logits(hidden[answers]), wanted)

    return loss


def fit(
    model: Llama, tokenizer: Tokenizer, recipe: Recipe, checkpoint: Checkpoint, loss_of: LossOf
) -> Progress:
    """Train `model` in place and return the cost.

    `checkpoint` is called on rank 0 every `recipe.checkpoint_every` steps and at the end.
    """
    optimiser = _Optimiser(model, recipe)
    progress = Progress()
    recent = 0.0
    for batch in _batches(tokenizer, recipe):
        done = progress.done(recipe)
        if done >= 1:
            break
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        _average_gradients(model)
        optimiser.step(learning_rate(done, recipe))
        progress.advance(batch.tokens.numel() * ddp.size())
        recent = loss.item() if not recent else 0.9 * recent + 0.1 * loss.item()
        if ddp.rank() != 0:
            continue
        if progress.step % _PRINT_EVERY == 0:
            _print(progress, recent)
        if progress.step % recipe.checkpoint_every == 0:
            checkpoint(model, progress)
    if ddp.rank() == 0:
        checkpoint(model, progress)
    return progress


def _average_gradients(model: Llama) -> None:
    """Replace gradients by their mean over all processes."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    ddp.all_reduce_(gradients)
    for gradient in gradients:
        gradient /= ddp.size()


def _batches(tokenizer: Tokenizer, recipe: Recipe) -> Iterator[Batch]:
    maker = BatchMaker(tokenizer, f"{recipe.seed}:{recipe.course}", recipe.weights)
    for number in itertools.count(1):
        # Copying over long distances is learned in short rows first, where it is cheaper.
        if number > recipe.long_from and number % _LONG_EVERY == 0:
            yield maker.long(recipe.long_rows, recipe.long_length)
        else:
            yield maker.short(recipe.rows, recipe.length)


def learning_rate(done: float, recipe: Recipe) -> float:
    """Return the learning rate as a share of its peak: warm-up, plateau, linear decay to zero."""
    return min(1.0, (done + 1e-3) / recipe.warmup, (1 - done) / recipe.cooldown)


class _Optimiser:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""

    def __init__(self, model: Llama, recipe: Recipe) -> None:
        matrices = [w for w in model.layers.parameters() if w.ndim == 2]
        chosen = {id(weight) for weight in matrices}
        others = [w for w in model.parameters() if id(w) not in chosen]
        self._recipe = recipe
        self._muon = Muon(matrices, momentum=0.95, decay=0.02)
        self._adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, rate: float) -> None:
        """Apply and clear the gradients; `rate` is the share of the peak rates."""
        self._muon.step(rate * self._recipe.muon_rate)
        for group in self._adam.param_groups:
            group["lr"] = rate * self._recipe.adam_rate
        self._adam.step()
        self._adam.zero_grad()


def _print(progress: Progress, loss: float) -> None:
    speed = progress.tokens / progress.wall
    print(
        f"step {progress.step:5}  loss {loss:.4f}  {progress.tokens / 1e6:5.2f} M tokens  "
        f"{speed:5.0f} tokens/s  {progress.wall:5.0f} s wall  {progress.cpu:5.0f} s cpu",
        flush=True,
    )
