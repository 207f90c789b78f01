"""Answers conversations with greedy decoding in Penstock's own engine, for `training.evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from penstock.common.sampling_params import SamplingParams
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.scheduling.sequence import NewSequence
from training.tasks import Conversation


class EngineAnswers:
    """A callable that answers conversations with greedy decoding in Penstock's engine.

    Args:
        folder: the model folder.
        quantization: quantization of the model's weights, one of `QUANTIZATIONS`.
        max_new_tokens: largest number of tokens of an answer.
        kv_cache_dtype: format of the KV cache.
    """

    def __init__(
        self, folder: Path, quantization: str, max_new_tokens: int, kv_cache_dtype: str = "auto"
    ) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        config = WorkerConfig(
            "engine", folder, quantization=quantization, kv_cache_dtype=kv_cache_dtype
        )
        self._engine = Engine(config)
        stops = self._engine.spec.eos_tokens
        self._params = SamplingParams(
            temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=stops
        )

    def __call__(self, conversations: Sequence[Conversation]) -> list[str]:
        for number, conversation in enumerate(conversations):
            tokens = self._tokenizer.apply_chat_template(
                conversation.messages,
                tools=list(conversation.tools) or None,
                add_generation_prompt=True,
                return_dict=True,
            )["input_ids"]
            self._engine.submit(NewSequence(number, tokens, len(tokens), self._params))
        answers: list[list[int]] = [[] for _ in conversations]
        while (result := self._engine.step()).output is not None:
            pairs = zip(result.output.keys, result.output.tokens.tolist(), strict=True)
            for key, token in pairs:
                answers[int(str(key))].append(token)
        return list(self._tokenizer.batch_decode(answers, skip_special_tokens=True))
