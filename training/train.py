"""`python -m training.train`: train the models in `penstock/models` from scratch.

The tokenizer, the demo model and its small sibling are trained one after another on text that the
families generate. Each checkpoint writes a complete folder, so an interrupted run leaves the last
checkpoint behind.
"""

from __future__ import annotations

import argparse
import ctypes
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from training import checkpoint, ddp, evaluate, model_card
from training import tokenizer as tokenizers
from training.curriculum import review_weights
from training.evaluate import Answer
from training.fit import LossOf, Progress, Recipe, answer_loss, distilled, fit
from training.model import Llama, LlamaShape

MODELS = Path(__file__).resolve().parent.parent / "penstock" / "models"
ABOUT_DEMO = (
    "A very small chat model that ships with Penstock, so that there is something to serve. "
    "It answers a few generated families of questions, tells short stories, and says so when it "
    "does not know."
)
ABOUT_SMALL = (
    "The small sibling of Penstock's demo model: the same tokenizer, a fifth of the size, "
    "distilled from it. It drafts tokens for the demo model, and shows what a loss of quality "
    "looks like."
)
DEMO = LlamaShape(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=512,
)
SMALL = LlamaShape(
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=320,
)
# The minutes are an upper limit: on two idle cores the steps need about three quarters of them.
DEMO_RECIPE = Recipe(steps=2200, minutes=27)
# Continues from the first course: lower learning rates, long rows from the start, and higher
# weights for weak families.
_REVIEW = Recipe(
    steps=760,
    minutes=9.5,
    muon_rate=0.007,
    adam_rate=0.0018,
    warmup=0.02,
    cooldown=1.0,
    long_from=0,
)
REVIEWS: tuple[Recipe, ...] = (replace(_REVIEW, course=1), replace(_REVIEW, course=2, minutes=10))
SMALL_RECIPE = Recipe(steps=1400, minutes=8)
MINUTES = sum(recipe.minutes for recipe in (DEMO_RECIPE, *REVIEWS, SMALL_RECIPE))


@dataclass(frozen=True, slots=True)
class Options:
    """Command-line options."""

    out: Path
    seed: int
    minutes: float
    questions: int
    resume: str

    def fitted(self, recipe: Recipe) -> Recipe:
        """Return `recipe` with this run's seed and its share of the run's minutes."""
        return replace(recipe, seed=self.seed, minutes=recipe.minutes * self.minutes / MINUTES)


@dataclass(frozen=True, slots=True)
class Maker:
    """Trains one model and writes it to its folder; only rank 0 writes."""

    name: str
    tokenizer: Tokenizer
    options: Options

    @property
    def folder(self) -> Path:
        """Folder of the model."""
        return self.options.out / self.name

    def fit(self, model: Llama, recipe: Recipe, loss_of: LossOf) -> Progress:
        """Train `model`; each checkpoint saves it and prints a short evaluation."""
        return fit(model, self.tokenizer, self.options.fitted(recipe), self._keep, loss_of)

    def answer(self) -> Answer | None:
        """Return a function that answers with the last checkpoint; None unless on rank 0."""
        return evaluate.transformers_answer(self.folder) if ddp.rank() == 0 else None

    def report(self, model: Llama, about: str, progress: Progress) -> None:
        """Print the held-out exact match, and write it with the model card."""
        answer = self.answer()
        if answer is None:
            return
        print(f"{self.name}: {model.num_parameters():,} parameters", flush=True)
        scores = evaluate.measure(answer, self.options.questions)
        print("\n".join(str(score) for score in scores), flush=True)
        evaluate.write_scores(scores, self.folder)
        run = model_card.Run(self.name, about, model, self.options.seed, progress, tuple(scores))
        model_card.write(self.folder, run)

    def _keep(self, model: Llama, progress: Progress) -> None:
        tokenizers.save(self.tokenizer, self.folder)
        checkpoint.save(model, self.folder)
        scores = evaluate.measure(evaluate.transformers_answer(self.folder), 16)
        print("  ".join(f"{score.family} {score.fraction:.0%}" for score in scores), flush=True)


def train(options: Options) -> None:
    """Train both models, as one process of the group."""
    _keep_freed_memory()
    tokenizer = _tokenizer(options)
    teacher = _make_demo(Maker("demo", tokenizer, options))
    _make_small(Maker("demo-small", tokenizer, options), teacher)


def _tokenizer(options: Options) -> Tokenizer:
    if options.resume:
        return Tokenizer.from_file(str(options.out / "demo" / "tokenizer.json"))
    return tokenizers.train(options.seed)


def _make_demo(maker: Maker) -> Llama:
    torch.manual_seed(maker.options.seed)
    if maker.options.resume == "sibling":
        return checkpoint.load(maker.folder)
    if maker.options.resume == "review":
        model, progress, reviews = checkpoint.load(maker.folder), Progress(), REVIEWS[-1:]
    else:
        model, reviews = Llama(DEMO), REVIEWS
        progress = maker.fit(model, DEMO_RECIPE, answer_loss)
    for review in reviews:
        weights = review_weights(maker.answer())
        progress += maker.fit(model, replace(review, weights=weights), answer_loss)
    maker.report(model, ABOUT_DEMO, progress)
    return model


def _make_small(maker: Maker, teacher: Llama) -> None:
    torch.manual_seed(maker.options.seed)
    model = Llama(SMALL)
    progress = maker.fit(model, SMALL_RECIPE, distilled(teacher))
    maker.report(model, ABOUT_SMALL, progress)


def main() -> None:
    """Train both models."""
    ddp.launch(partial(train, _options()), ddp.NUM_PROCESSES)


def _options() -> Options:
    parser = argparse.ArgumentParser(description="Train the demo models from generated text.")
    parser.add_argument("--out", type=Path, default=MODELS, help="folder for the two model folders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="most CPU minutes per process; the learning rate schedule is fitted to them",
    )
    parser.add_argument(
        "--resume",
        choices=("review", "sibling"),
        default="",
        help="continue from the existing demo model: with its last review or with its sibling",
    )
    parser.add_argument("--questions", type=int, default=200, help="held-out questions per family")
    return Options(**vars(parser.parse_args()))


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory: mapping activations anew takes a sixth of each step."""
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, 2_000_000_000)
    libc.mallopt(top_pad, 256 << 20)


if __name__ == "__main__":
    main()
