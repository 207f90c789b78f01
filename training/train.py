"""`python -m training.train`: train the models in `penstock/models` from scratch.

The tokenizer, the demo model and a smaller version of it are trained one after another. The text
for training comes from the question families (`training.tasks`). Each checkpoint is a complete
model folder, so the last checkpoint remains usable if the run is interrupted.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from training import chat, checkpoint, ddp, evaluate, model_card
from training import tokenizer as tokenizers
from training.curriculum import review_weights
from training.evaluate import Answer
from training.fit import LossOf, Progress, Recipe, answer_loss, distilled, fit
from training.model import Llama, LlamaShape
from training.tasks import FAMILIES

MODELS = Path(__file__).resolve().parent.parent / "penstock" / "models"
ABOUT_DEMO = (
    "A very small chat model that ships with Penstock, so that a first server needs no download. "
    "It answers a few families of generated questions, tells short stories, and says when it does "
    "not know an answer."
)
ABOUT_TOOLS = " It can call a calculator and a look-up."
ABOUT_SMALL = (
    "A small model that was distilled from Penstock's demo model. It has the same tokenizer and a "
    "fifth of the demo model's size. It drafts tokens for the demo model, and shows what a loss of "
    "quality looks like."
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
# The value of `minutes` is an upper limit. On two idle cores, the steps take about 3/4 of it.
DEMO_RECIPE = Recipe(steps=2200, minutes=27)
# A review continues the training after the first stage, with lower learning rates. It has long
# rows from the start, and gives more weight to families with many wrong answers.
_REVIEW = Recipe(
    steps=760,
    minutes=9.5,
    muon_rate=0.007,
    adam_rate=0.0018,
    warmup=0.02,
    cooldown=1.0,
    long_from=0,
)
REVIEWS: tuple[Recipe, ...] = (replace(_REVIEW, stage=1), replace(_REVIEW, stage=2, minutes=10))
SMALL_RECIPE = Recipe(steps=1400, minutes=8)
# Conversations with tools are longer than others, so they make up about half of the tokens.
# The other tokens repeat families without tools, so that the model does not forget these.
_TOOLS = replace(
    _REVIEW,
    stage=3,
    steps=700,
    minutes=9.5,
    muon_rate=0.006,
    adam_rate=0.0015,
    rows=3,
    length=512,
    checkpoint_every=700,
    tools=0.45,
)
# After the recipe `_TOOLS`, the model makes more errors in some question families without tools.
# The later recipes with tools therefore give more weight to these families.
_REPAIR = replace(
    _TOOLS,
    stage=4,
    steps=150,
    minutes=2.2,
    muon_rate=0.003,
    adam_rate=0.00075,
    warmup=0.05,
    checkpoint_every=300,
    tools=0.25,
    weights={
        "addition": 2.2,
        "subtraction": 3.0,
        "addition_large": 5.0,
        "sort_words": 4.4,
        "sort_numbers": 2.0,
        "largest": 1.2,
    },
)
TOOL_RECIPES: tuple[Recipe, ...] = (
    _TOOLS,
    _REPAIR,
    replace(
        _REPAIR,
        stage=5,
        steps=240,
        minutes=3.7,
        muon_rate=0.004,
        adam_rate=0.001,
        tools=0.35,
        weights={**_REPAIR.weights, "subtraction": 3.3, "sort_words": 3.0, "copy": 2.0},
    ),
)
# The final weights of the model are the mean of its weights after each of the last two recipes.
# It answers more questions correctly with this mean than with the weights after either recipe.
NUM_AVERAGED = 2
MINUTES = sum(recipe.minutes for recipe in (DEMO_RECIPE, *REVIEWS, SMALL_RECIPE, *TOOL_RECIPES))


@dataclass(frozen=True, slots=True)
class Options:
    """Command-line options of the training."""

    out: Path
    seed: int
    minutes: float
    questions: int
    resume: str

    @property
    def command(self) -> str:
        """The command that the model card gives for the training."""
        resumed = f"python -m training.train --resume {self.resume}"
        return resumed if self.resume else "make train-demo"

    def fitted(self, recipe: Recipe) -> Recipe:
        """Return `recipe` with the seed of this run, and with `minutes` scaled to its time limit.

        The time limit of the run is the option `--minutes`.
        """
        return replace(recipe, seed=self.seed, minutes=recipe.minutes * self.minutes / MINUTES)


@dataclass(frozen=True, slots=True)
class Maker:
    """Trains one model. Rank 0 writes the model to the model's folder.

    Attributes:
        name: name of the model and of its folder.
        tools: whether the model learns to call tools.
    """

    name: str
    tokenizer: Tokenizer
    options: Options
    tools: bool = False

    @property
    def families(self) -> list[str]:
        """Names of the question families that the model learns."""
        return [family.name for family in FAMILIES.values() if self.tools or not family.tools]

    @property
    def folder(self) -> Path:
        """The folder of the model."""
        return self.options.out / self.name

    def fit(self, model: Llama, recipe: Recipe, loss_of: LossOf) -> Progress:
        """Train `model`. At each checkpoint, save the model and print a short evaluation."""
        return fit(model, self.tokenizer, self.options.fitted(recipe), self._keep, loss_of)

    def answer(self) -> Answer | None:
        """Return a function that answers conversations with the last checkpoint.

        Return None on ranks other than 0.
        """
        return evaluate.transformers_answer(self.folder) if ddp.rank() == 0 else None

    def report(
        self, model: Llama, about: str, progress: Progress | None, stage: Progress | None = None
    ) -> None:
        """Print the scores on held-out questions, and write them and the model card to the folder.

        Args:
            progress: progress of all other training stages, or None if it is not known.
            stage: progress of the training stage about tools, or None without such a stage. If
                there was a stage, the folder has the scores from before it, which the model card
                shows as well.
        """
        answer = self.answer()
        if answer is None:
            return
        print(f"{self.name}: {model.num_parameters():,} parameters", flush=True)
        before = evaluate.read_scores(self.folder) if stage is not None else []
        scores = evaluate.measure(answer, self.options.questions, families=self.families)
        print("\n".join(str(score) for score in scores), flush=True)
        evaluate.write_scores(scores, self.folder)
        seed, command = self.options.seed, self.options.command
        run = model_card.Run(self.name, about, model, seed, progress, tuple(scores), command)
        if stage is not None:
            run = replace(run, stage=model_card.Stage(stage, tuple(before)))
        model_card.write(self.folder, run)

    def _keep(self, model: Llama, progress: Progress) -> None:
        template = chat.TOOL_TEMPLATE if self.tools else chat.TEMPLATE
        tokenizers.save(self.tokenizer, self.folder, template)
        checkpoint.save(model, self.folder)
        answer = evaluate.transformers_answer(self.folder)
        scores = evaluate.measure(answer, 16, families=self.families)
        print("  ".join(f"{score.family} {score.fraction:.0%}" for score in scores), flush=True)


def train(options: Options) -> None:
    """Train the demo model and the small model. Each process of the group runs this function."""
    _keep_freed_memory()
    tokenizer = _tokenizer(options)
    model, progress = _make_demo(Maker("demo", tokenizer, options))
    if options.resume != "tools":
        _make_small(Maker("demo-small", tokenizer, options), model)
    if options.resume != "sibling":
        _teach_tools(Maker("demo", tokenizer, options, tools=True), model, progress)


def _tokenizer(options: Options) -> Tokenizer:
    if options.resume:
        return Tokenizer.from_file(str(options.out / "demo" / "tokenizer.json"))
    return tokenizers.train(options.seed)


def _make_demo(maker: Maker) -> tuple[Llama, Progress | None]:
    """Return the demo model without the stage about tools.

    The progress is None if the training of an existing model was continued.
    """
    torch.manual_seed(maker.options.seed)
    if maker.options.resume:
        model, progress = checkpoint.load(maker.folder), None
        reviews = REVIEWS[-1:] if maker.options.resume == "review" else ()
    else:
        model, reviews = Llama(DEMO), REVIEWS
        progress = maker.fit(model, DEMO_RECIPE, answer_loss)
    for review in reviews:
        weights = review_weights(maker.answer())
        done = maker.fit(model, replace(review, weights=weights), answer_loss)
        progress = None if progress is None else progress + done
    if reviews:
        maker.report(model, ABOUT_DEMO, progress)
    return model, progress


def _make_small(maker: Maker, teacher: Llama) -> None:
    torch.manual_seed(maker.options.seed)
    model = Llama(SMALL)
    progress = maker.fit(model, SMALL_RECIPE, distilled(teacher))
    maker.report(model, ABOUT_SMALL, progress)


def _teach_tools(maker: Maker, model: Llama, progress: Progress | None) -> None:
    """Continue the training of the demo model with conversations that offer tools.

    The small model does not learn to call tools, because it is distilled from the demo model before
    this stage.
    """
    stage = Progress()
    ends: list[Llama] = []
    for recipe in TOOL_RECIPES:
        stage += maker.fit(model, recipe, answer_loss)
        ends.append(copy.deepcopy(model))
    average_(model, ends[-NUM_AVERAGED:])
    if ddp.rank() == 0:
        checkpoint.save(model, maker.folder)
    maker.report(model, ABOUT_DEMO + ABOUT_TOOLS, progress, stage)


@torch.no_grad()
def average_(model: Llama, others: Sequence[Llama]) -> None:
    """Set the weights of `model` to the mean of the weights of `others`."""
    for weight, *given in zip(
        model.parameters(), *(other.parameters() for other in others), strict=True
    ):
        weight.copy_(torch.stack(given).mean(0))


def main() -> None:
    """Start the processes that train both models."""
    ddp.launch(partial(train, _options()), ddp.NUM_PROCESSES)


def _options() -> Options:
    parser = argparse.ArgumentParser(description="Train the demo models from generated text.")
    parser.add_argument("--out", type=Path, default=MODELS, help="folder for the two model folders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="limit of CPU minutes per process, to which the learning rate schedule is scaled",
    )
    parser.add_argument(
        "--resume",
        choices=("review", "sibling", "tools"),
        default="",
        help="continue from the existing demo model: with its last review, with its sibling, or "
        "only with the stage about tools",
    )
    parser.add_argument("--questions", type=int, default=200, help="held-out questions per family")
    return Options(**vars(parser.parse_args()))


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory.

    Otherwise, mapping the memory again would take a sixth of the time of each step.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, 2_000_000_000)
    libc.mallopt(top_pad, 256 << 20)


if __name__ == "__main__":
    main()
