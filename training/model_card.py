"""Writes the model card with the scores of a model. The card is README.md in the model folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training import ddp
from training.evaluate import CLAIM_BOUND, Score
from training.fit import LONG_LENGTH, Progress
from training.model import Llama, LlamaShape
from training.tasks import FAMILIES

_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# Penstock {name}

{about}

| | |
|---|---|
| architecture | {architecture} |
| parameters | {parameters:,} (float32, {megabytes:.1f} MB) |
| tokenizer | byte-level BPE, {vocab} tokens, one token per digit; any UTF-8 text has an encoding |
| context | {context} positions; trained on rows of up to {long_length} tokens |
| chat template | `<|begin|><|user|>...<|end|><|assistant|>...<|end|>`, {template} |
| licence | Apache-2.0 |

## Held-out exact match

With greedy decoding, the model answers questions that do not occur in the training text. A keyed
hash of each question decides whether the question is used for training or is held out. Some
families have only a few facts, and the model has seen each of these facts in training. In these
families, only the wording of a held-out question is new.
`python -m training.evaluate {folder}` measures these numbers again.

{rows}

The column "claimed" says "yes" if at least {bound:.0%} of the answers to the family's held-out
questions are right. The model is trained and measured on the other families too, but its answers to
their questions are not reliable.
{tools}
## Training

The model is trained from scratch, on text that the script generates. Nothing is downloaded.

- command: `{command}`
- seed {seed}, {cost}
{note}
## Limits

The model knows the families of questions in the table, in the wordings of `training/tasks`. It
knows few other wordings, no other languages and no facts about the world. It is made to show and to
test a serving system, and to answer in milliseconds on a CPU. Do not use it for anything else.
"""

_TEMPLATE = "`<|system|>` comes first if there is a system message"
_TOOL_TEMPLATE = (
    "`<|system|>` with the tools comes first if there are tools; calls have the format `hermes`"
)
_COST = """\
{steps:,} steps, {tokens:.1f} million tokens
- {wall:,.0f} s wall-clock time and {cpu:,.0f} s of processor time in {processes} processes
  with one thread each; the tests at checkpoints are included"""

_TOOLS = """
## Tools

The model can call two tools: `calculator` with the parameter `expression`, and `lookup` with the
parameter `key`. It calls the calculator for every sum, difference, product and quotient, and the
look-up for the entry of a key. It answers other questions itself. If a question needs a tool that
is missing, the model answers that it does not know. It makes one call at a time, and repeats the
result in a sentence.

The model has not learned to call tools with other names or parameters. With such tools, expect no
call or a wrong call. The descriptions of tools may have any text. The model copies keys and results
correctly if they look like those of `training/tasks/tools.py`: codes, names, numbers, and words
from the lists that this file uses. Other words are often copied wrongly.

The column "before" has the scores that the model reached on the same questions before the training
stage about tools.
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """The training stage with tools: its progress, and the model's scores before it."""

    progress: Progress
    before: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Data of a finished training run, from which the model card is written.

    Attributes:
        progress: progress of all training stages except the stage with tools, or None if the
            training continued an existing model, of which the cost is not known.
        stage: the training stage with tools, or None if the model was trained without tools.
        note: more lines for the section of the card about training.
    """

    name: str
    about: str
    model: Llama
    seed: int
    progress: Progress | None
    scores: tuple[Score, ...]
    command: str = "make train-demo"
    note: str = ""
    stage: Stage | None = None


def write(folder: Path, run: Run) -> None:
    """Write the model card of `run` into its folder."""
    shape = run.model.shape
    text = _CARD.format(
        name=run.name,
        about=run.about,
        architecture=_architecture(shape),
        parameters=run.model.num_parameters(),
        megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        vocab=shape.vocab_size,
        context=shape.max_position_embeddings,
        long_length=LONG_LENGTH,
        folder=f"penstock/models/{run.name}",
        template=_TOOL_TEMPLATE if run.stage else _TEMPLATE,
        rows=_table(run),
        tools=_TOOLS if run.stage else "",
        bound=CLAIM_BOUND,
        command=run.command,
        seed=run.seed,
        cost=_cost(run.progress),
        note=_note(run),
    )
    (folder / "README.md").write_text(text)


def _architecture(shape: LlamaShape) -> str:
    return (
        f"Llama: {shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, "
        f"{shape.num_attention_heads} query and {shape.num_key_value_heads} key-value heads "
        f"of {shape.head_dim}, feed-forward {shape.intermediate_size}, tied embeddings"
    )


def _cost(progress: Progress | None) -> str:
    if progress is None:
        return "the training continued an existing model; the cost of the whole is not known"
    return _COST.format(
        steps=progress.step,
        tokens=progress.tokens / 1e6,
        wall=progress.wall,
        cpu=progress.cpu,
        processes=ddp.NUM_PROCESSES,
    )


def _note(run: Run) -> str:
    lines = [f"- the stage about tools: {_cost(run.stage.progress)}"] if run.stage else []
    return "".join(f"{line}\n" for line in (*lines, run.note) if line)


def _table(run: Run) -> str:
    """Return the table of scores.

    If the model had a training stage with tools, the table also has the scores before that stage.
    """
    if run.stage is None:
        head = ["| family | what it asks | exact match | claimed |", "|---|---|--:|---|"]
        return "\n".join([*head, *(_row(score, "") for score in run.scores)])
    before = {score.family: f" {score.right}/{score.total} |" for score in run.stage.before}
    head = ["| family | what it asks | before | exact match | claimed |", "|---|---|--:|--:|---|"]
    return "\n".join([*head, *(_row(each, before.get(each.family, " - |")) for each in run.scores)])


def _row(score: Score, before: str) -> str:
    about = FAMILIES[score.family].about.rstrip(".")
    measured = f"{score.fraction:.1%} ({score.right}/{score.total})"
    claimed = "yes" if score.is_claimed else "no"
    return f"| {score.family} | {about} |{before} {measured} | {claimed} |"
