"""Writes the model card: README.md of a model folder, with the measured results."""

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
| tokenizer | byte-level BPE, {vocab} tokens, digits alone; any UTF-8 text has an encoding |
| context | {context} positions; trained on rows of up to {long_length} tokens |
| chat template | `<|begin|><|user|>...<|end|><|assistant|>...<|end|>`, `<|system|>` first if any |
| licence | Apache-2.0 |

## Held-out exact match

Greedy answers to questions that do not occur in the training text: a keyed hash of each problem
puts it on one side of the split. Where the table says that the facts are known, the problem is the
wording: the facts are few and finite, and the model has seen each of them in another wording.
`python -m training.evaluate {folder}` prints these numbers again.

| family | what it asks | exact match | claimed |
|---|---|--:|---|
{rows}

A family is claimed when at least {bound:.0%} of its held-out answers are right. What is not claimed
is trained and measured all the same, and should not be relied upon.

## Training

From scratch, on text that the script generates; nothing is downloaded.

- command: `{command}`
- seed {seed}, {steps:,} steps, {tokens:.1f} million tokens
- {wall:,.0f} s wall clock and {cpu:,.0f} s of processor time in {processes} processes of one
  thread each, the tests at the checkpoints included{note}

## Limits

It knows the families of questions in the table, in the wordings of `training/tasks`, and
nothing else: no facts about the world, no other languages, few other wordings. It is made to show
and to test a serving system, and to answer in milliseconds on a CPU. Use it for nothing else.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """Data of a finished training run for its model card."""

    name: str
    about: str
    model: Llama
    seed: int
    progress: Progress
    scores: tuple[Score, ...]
    command: str = "make train-demo"
    note: str = ""


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
        rows="\n".join(_row(score) for score in run.scores),
        bound=CLAIM_BOUND,
        command=run.command,
        seed=run.seed,
        steps=run.progress.step,
        tokens=run.progress.tokens / 1e6,
        wall=run.progress.wall,
        cpu=run.progress.cpu,
        processes=ddp.NUM_PROCESSES,
        note=run.note,
    )
    (folder / "README.md").write_text(text)


def _architecture(shape: LlamaShape) -> str:
    return (
        f"Llama: {shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, "
        f"{shape.num_attention_heads} query and {shape.num_key_value_heads} key-value heads "
        f"of {shape.head_dim}, feed-forward {shape.intermediate_size}, tied embeddings"
    )


def _row(score: Score) -> str:
    about = FAMILIES[score.family].about.rstrip(".")
    measured = f"{score.fraction:.1%} ({score.right}/{score.total})"
    return f"| {score.family} | {about} | {measured} | {'yes' if score.is_claimed else 'no'} |"
