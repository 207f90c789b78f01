"""Held-out questions as tokens, and the results of a model on them in Penstock's engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.quality.statistics import Results
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.scheduling.sequence import NewSequence
from training.tasks import FAMILIES, Example

MAX_NEW_TOKENS = 224


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out question: the tokens of its prompt and of its answer, including the end token."""

    prompt: list[int]
    answer: list[int]
    accepts: Callable[[str], bool]


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def held_out(tokenizer: Any, count: int) -> list[Question]:
    """Return at most `count` held-out questions of each family."""
    return [
        _question(tokenizer, example, task.accepts)
        for task in FAMILIES.values()
        for example in task.held_out(count)
    ]


def calibration_sequences(tokenizer: Any, count: int) -> list[list[int]]:
    """Return the tokens of `count` training conversations per family, including the answers."""
    found = [
        _question(tokenizer, example, task.accepts)
        for task in FAMILIES.values()
        for example in task.practice(count)
    ]
    return [[*question.prompt, *question.answer] for question in found]


def _question(
    tokenizer: Any, example: Example, accepts: Callable[[Example, str], bool]
) -> Question:
    messages, tools = example.messages(), list(example.tools) or None
    prompt = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    answered = [*messages, {"role": "assistant", "content": example.answer}]
    whole = tokenizer.apply_chat_template(answered, tools=tools, return_dict=True)["input_ids"]
    assert whole[: len(prompt)] == prompt
    return Question(prompt, whole[len(prompt) :], lambda text: accepts(example, text))


def results_of(
    folder: Path,
    quantization: str,
    kv_cache_dtype: str,
    tokenizer: Any,
    questions: Sequence[Question],
) -> Results:
    """Return a model's results with a format of its weights and of its KV cache."""
    engine = Engine(
        WorkerConfig(
            "quality", folder, quantization=quantization, kv_cache_dtype=kv_cache_dtype,
            max_queued=len(questions), kv_cache_mib=256, threads=1,
        )
    )  # fmt: skip
    texts = _answers(engine, tokenizer, questions)
    right = [each.accepts(text) for each, text in zip(questions, texts, strict=True)]
    tokens = [len(each.answer) for each in questions]
    return Results(
        np.array(right, np.float64), _losses(engine, questions), np.array(tokens, np.float64)
    )


def _answers(engine: Engine, tokenizer: Any, questions: Sequence[Question]) -> list[str]:
    params = SamplingParams(
        temperature=0.0, max_tokens=MAX_NEW_TOKENS, stop_token_ids=engine.spec.eos_tokens
    )
    found: list[list[int]] = [[] for _ in questions]
    for number, question in enumerate(questions):
        engine.submit(NewSequence(number, question.prompt, len(question.prompt), params))
    while (output := engine.step().output) is not None:
        for key, token in zip(output.keys, output.tokens.tolist(), strict=True):
            found[int(str(key))].append(token)
    return list(tokenizer.batch_decode(found, skip_special_tokens=True))


def _losses(engine: Engine, questions: Sequence[Question]) -> Any:
    """Return, for each question, the negative log-likelihood of the expected answer."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = np.zeros(len(questions))
    for number, question in enumerate(questions):
        tokens = [*question.prompt, *question.answer]
        engine.submit(NewSequence(number, tokens, len(tokens), params))
    while (result := engine.step()).output is not None:
        for scored in result.prompts:
            number = int(str(scored.key))
            for position, entry in enumerate(scored.entries, scored.position):
                if position >= len(questions[number].prompt) and entry is not None:
                    found[number] -= entry.chosen
    return found
