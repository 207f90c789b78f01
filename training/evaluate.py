"""Measures how many held-out questions of each question family a model answers exactly.

`python -m training.evaluate FOLDER` runs the model in `transformers`. With the option `--engine
QUANTIZATION`, it runs the model in Penstock's own engine. `measure` accepts any function that
answers conversations, for example a client of a running server.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from penstock.workers.config import KV_CACHE_DTYPES, QUANTIZATIONS
from training.engine_answers import EngineAnswers
from training.tasks import FAMILIES, Conversation, Example, Task

CLAIM_BOUND = 0.9
SCORES = "held_out.json"
MAX_NEW_TOKENS = 224
_BATCH = 64

Answer = Callable[[Sequence[Conversation]], list[str]]


@dataclass(frozen=True, slots=True)
class Score:
    """Result for one question family: the number of correct answers and the number of questions."""

    family: str
    right: int
    total: int

    @property
    def fraction(self) -> float:
        """Fraction of the questions that were answered correctly."""
        return self.right / self.total

    @property
    def is_claimed(self) -> bool:
        """True if the model card claims that the model can answer the questions of the family."""
        return self.fraction >= CLAIM_BOUND

    def __str__(self) -> str:
        return f"{self.family:<16} {100 * self.fraction:5.1f} %  ({self.right} of {self.total})"


def measure(
    answer: Answer, count: int, *, seed: int = 0, families: Iterable[str] = ()
) -> list[Score]:
    """Score a model on held-out questions of each family.

    Args:
        answer: takes a list of conversations whose last question has no answer yet, and returns
            one answer per conversation. A tool call is returned as the text that the model writes.
        count: largest number of questions per family.
        seed: seed of the random choice of questions.
        families: names of the families, or () for all families.
    """
    return [
        score(answer, FAMILIES[name], FAMILIES[name].held_out(count, seed))
        for name in families or FAMILIES
    ]


def score(answer: Answer, family: Task, examples: Sequence[Example]) -> Score:
    """Answer `examples` of one question family with `answer`; return how many answers are right."""
    texts = answer([example.conversation() for example in examples])
    right = sum(map(family.accepts, examples, texts))
    return Score(family.name, right, len(examples))


def write_scores(scores: Iterable[Score], folder: Path) -> None:
    """Write the scores of a model into its folder."""
    content = {score.family: {"right": score.right, "total": score.total} for score in scores}
    (folder / SCORES).write_text(json.dumps(content, indent=2) + "\n")


def read_scores(folder: Path) -> list[Score]:
    """Read the scores that `write_scores` has written into a model folder."""
    content = json.loads((folder / SCORES).read_text())
    return [Score(name, entry["right"], entry["total"]) for name, entry in content.items()]


def transformers_answer(folder: Path) -> Answer:
    """Return a function that answers conversations with greedy decoding in `transformers`."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder)

    def answer_batch(conversations: Sequence[Conversation]) -> list[str]:
        prompts = [
            tokenizer.apply_chat_template(
                conversation.messages,
                tools=list(conversation.tools) or None,
                add_generation_prompt=True,
                tokenize=False,
            )
            for conversation in conversations
        ]
        inputs = tokenizer(prompts, padding=True, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            outputs = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers = outputs[:, inputs["input_ids"].shape[1] :]
        return list(tokenizer.batch_decode(answers, skip_special_tokens=True))

    def answer(conversations: Sequence[Conversation]) -> list[str]:
        starts = range(0, len(conversations), _BATCH)
        batches = (answer_batch(conversations[start : start + _BATCH]) for start in starts)
        return [text for batch in batches for text in batch]

    return answer


def main() -> None:
    """Print the scores of a model folder on held-out questions."""
    parser = argparse.ArgumentParser(
        description="Measure how many held-out questions a model answers exactly."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200, help="questions per family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", action="append", default=[], choices=sorted(FAMILIES))
    parser.add_argument(
        "--engine", choices=QUANTIZATIONS, help="use Penstock's engine with this quantization"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="with --engine: format of the KV cache",
    )
    options = parser.parse_args()
    if options.engine is None and options.kv_cache_dtype != "auto":
        parser.error("--kv-cache-dtype needs --engine: add --engine, or leave out --kv-cache-dtype")
    if options.engine is None:
        answer = transformers_answer(options.folder)
    else:
        answer = EngineAnswers(
            options.folder, options.engine, MAX_NEW_TOKENS, options.kv_cache_dtype
        )
    for name in options.family or FAMILIES:
        print(*measure(answer, options.count, seed=options.seed, families=[name]), flush=True)


if __name__ == "__main__":
    main()
