"""The training loop: trains a model on generated batches.

The training ends after a number of steps or minutes. The minutes are CPU time instead of wall time.
On a busy machine, training therefore takes longer but gives the same model.
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
    # Limit of the CPU time per process. The run ends early when it reaches this limit.
    minutes: float
    seed: int = 0
    # Number of the training stage. Each stage draws different random examples, because the
    # number is a part of their seed.
    stage: int = 0
    rows: int = 6  # number of rows in each batch of one process
    length: int = 256
    long_rows: int = 1
    long_length: int = LONG_LENGTH
    long_from: int = 350  # number of the first step that may have long rows
    muon_rate: float = 0.012
    adam_rate: float = 0.003
    warmup: float = 0.01  # duration of the warm-up, as a fraction of the run
    # Duration of the final linear decay of the learning rate, as a fraction of the run.
    cooldown: float = 0.9
    checkpoint_every: int = 600
    tools: float = 0.0  # fraction of the short conversations that offer tools
    # Weights of question families, by name. They replace the families' own weights.
    weights: Mapping[str, float] = field(default_factory=dict)


def _clocks() -> Tensor:
    """Return the wall time and the CPU time of this process in seconds, as float64 [2]."""
    return torch.tensor([time.monotonic(), time.process_time()], dtype=torch.float64)


@dataclass(slots=True)
class Progress:
    """Progress of a run: numbers of steps and tokens, and times in seconds.

    `wall` is the wall time, and `cpu` is the CPU time of all processes together.
    """

    step: int = 0
    tokens: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    _started: Tensor = field(default_factory=_clocks)

    def advance(self, tokens: int) -> None:
        """Count one step with `tokens` tokens, and update the times."""
        self.step += 1
        self.tokens += tokens
        spent = _clocks() - self._started
        # Use the sum over all processes, so that all of them stop at the same step.
        ddp.all_reduce_([spent])
        self.wall = spent[0].item() / ddp.size()
        self.cpu = spent[1].item()

    def done(self, recipe: Recipe) -> float:
        """Return the completed fraction of the run.

        The result is the larger of two fractions: the number of steps divided by `recipe.steps`,
        and the CPU minutes per process divided by `recipe.minutes`.
        """
        minutes = self.cpu / ddp.size() / 60
        return max(self.step / recipe.steps, minutes / recipe.minutes)

    def __add__(self, later: Progress) -> Progress:
        """Return the sum of this progress and the progress of a later run."""
        return Progress(
            step=self.step + later.step,
            tokens=self.tokens + later.tokens,
            wall=self.wall + later.wall,
            cpu=self.cpu + later.cpu,
        )


Checkpoint = Callable[[Llama, Progress], None]
LossOf = Callable[[Llama, Batch], Tensor]


def answer_loss(model: Llama, batch: Batch) -> Tensor:
    """Return the cross entropy of the next-token predictions, weighted with `batch.weights`."""
    counted = batch.weights > 0
    logits = model.logits(model(batch.tokens, batch.mask)[counted])
    losses = F.cross_entropy(logits, batch.targets[counted], reduction="none")
    return (losses * batch.weights[counted]).sum() / batch.weights.sum()


def distilled(teacher: Llama) -> LossOf:
    """Return a loss function for distillation from `teacher`.

    The loss is the cross entropy between the teacher's and the model's predictions. Only tokens of
    answers are counted.
    """

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
    """Train `model` in place and return the progress of the run.

    Args:
        checkpoint: called on rank 0 every `recipe.checkpoint_every` steps, and at the end.
        loss_of: computes the loss of a batch.
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
    """Replace all gradients by their mean over all processes."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    ddp.all_reduce_(gradients)
    for gradient in gradients:
        gradient /= ddp.size()


def _batches(tokenizer: Tokenizer, recipe: Recipe) -> Iterator[Batch]:
    maker = BatchMaker(tokenizer, f"{recipe.seed}:{recipe.stage}", recipe.weights, recipe.tools)
    for number in itertools.count(1):
        # The first batches have short rows, which are cheaper and teach the model to copy. Later,
        # some batches have long rows, so that it also learns to copy over long distances.
        if number > recipe.long_from and number % _LONG_EVERY == 0:
            yield maker.long(recipe.long_rows, recipe.long_length)
        else:
            yield maker.short(recipe.rows, recipe.length)


def learning_rate(done: float, recipe: Recipe) -> float:
    """Return the learning rate as a fraction of its peak.

    The rate warms up, stays constant, and then decays linearly to zero.

    Args:
        done: the completed fraction of the run.
    """
    return min(1.0, (done + 1e-3) / recipe.warmup, (1 - done) / recipe.cooldown)


class _Optimiser:
    """Muon for the weight matrices of the layers, and AdamW for the embedding and the norms."""

    def __init__(self, model: Llama, recipe: Recipe) -> None:
        matrices = [w for w in model.layers.parameters() if w.ndim == 2]
        chosen = {id(weight) for weight in matrices}
        others = [w for w in model.parameters() if id(w) not in chosen]
        self._recipe = recipe
        self._muon = Muon(matrices, momentum=0.95, decay=0.02)
        self._adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, rate: float) -> None:
        """Update the weights, and clear the gradients.

        Args:
            rate: the learning rates, as a fraction of their peaks.
        """
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
