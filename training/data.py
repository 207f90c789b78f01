"""Makes training batches by packing generated conversations into rows of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training import chat, ddp
from training.tasks import FAMILIES, Example, Message, Task
from training.tasks.tools import FORCED_STARTS, training_conversation

# The tokens of user messages have a small weight in the loss, because predicting these tokens
# trains features that answers need. Only a random part of these tokens is used, so that the logits
# of the others need not be computed.
PROMPT_WEIGHT = 0.25
_PROMPT_FRACTION = 0.25
_FULL_LENGTH = 16
_SYSTEM_FRACTION = 0.15
_CASUAL_FRACTION = 0.1
_PLAIN_FRACTION = 0.02
_LONG_FAMILY_FRACTION = 0.75
_SYSTEM = (
    "You are a helpful assistant.",
    "You are Penstock's demo model.",
    "Answer briefly.",
    "You are a friendly and helpful assistant. Answer the questions of the user.",
    "Be concise and correct.",
)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of rows of tokens. Each row contains conversations, one after another."""

    tokens: Tensor  # token ids, int64 [rows, length]
    targets: Tensor  # id of the token that follows each token of `tokens`, int64 [rows, length]
    weights: Tensor  # weight of each target in the loss, float32 [rows, length]
    # Mask of causal attention within each conversation, bool [rows, 1, length, length].
    mask: Tensor


class BatchMaker:
    """Makes random conversations from training questions and packs them into rows of tokens.

    Args:
        tokenizer: the tokenizer of the model.
        seed: text that, together with the rank, determines the random conversations.
        weights: weights of question families, by name. They replace the families' own weights.
        tools: fraction of the short conversations that offer tools.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: str,
        weights: Mapping[str, float] | None = None,
        tools: float = 0.0,
    ) -> None:
        self._tokenizer = tokenizer
        self._rng = Random(f"train:{seed}:{ddp.rank()}")
        self._weights = {family.name: family.weight for family in FAMILIES.values()}
        self._weights |= weights or {}
        self._tools = tools
        families = [family for family in FAMILIES.values() if not family.tools]
        self._short = [family for family in families if not family.long]
        self._long = [family for family in families if family.long]
        self._forced = [tokenizer.encode(start).ids for start in FORCED_STARTS]
        self._assistant = _id(tokenizer, chat.ASSISTANT)
        self._end = _id(tokenizer, chat.END)

    def short(self, rows: int, length: int) -> Batch:
        """Return a batch whose rows contain conversations of one turn or a few turns."""
        return self._batch([self._row(length, long=False) for _ in range(rows)])

    def long(self, rows: int, length: int) -> Batch:
        """Return a batch whose rows begin with a long prompt or a conversation of many turns."""
        return self._batch([self._row(length, long=True) for _ in range(rows)])

    def _row(self, length: int, *, long: bool) -> list[list[int]]:
        """Return the token ids of each conversation of a row, which has `length + 1` tokens.

        The last conversation is cut off at the end of the row.
        """
        row: list[list[int]] = []
        num_missing = length + 1
        while num_missing > 0:
            text = self._long_text() if long and not row else self._short_text()
            row.append(self._tokenizer.encode(text).ids[:num_missing])
            num_missing -= len(row[-1])
        return row

    def _short_text(self) -> str:
        if self._tools and self._rng.random() < self._tools:
            return self._tool_text()
        if self._rng.random() < _PLAIN_FRACTION:
            return FAMILIES["story"].training_example(self._rng).answer + chat.END
        count = 1
        while self._rng.random() < 0.5:
            count += 1
        return self._conversation(self._pick(self._short) for _ in range(count))

    def _long_text(self) -> str:
        if self._rng.random() < _LONG_FAMILY_FRACTION:
            return self._conversation([self._pick(self._long), self._pick(self._short)])
        return self._conversation(self._pick(self._short) for _ in range(40))

    def _tool_text(self) -> str:
        conversation = training_conversation(self._rng, self._weights)
        messages = conversation.messages
        for message in messages:
            if message["role"] == "user" and self._rng.random() < _CASUAL_FRACTION:
                message["content"] = _casual(message["content"])
        return chat.render(self._system() + messages, conversation.tools)

    def _pick(self, families: list[Task]) -> list[Example]:
        weights = [self._weights[family.name] for family in families]
        return self._rng.choices(families, weights)[0].training_examples(self._rng)

    def _conversation(self, picked: Iterable[list[Example]]) -> str:
        messages = self._system()
        for example in chain.from_iterable(picked):
            messages += [*example.messages(), {"role": "assistant", "content": example.answer}]
            if self._rng.random() < _CASUAL_FRACTION:
                messages[-2]["content"] = _casual(example.prompt)
        return chat.render(messages)

    def _system(self) -> list[Message]:
        if self._rng.random() < _SYSTEM_FRACTION:
            return [{"role": "system", "content": self._rng.choice(_SYSTEM)}]
        return []

    def _batch(self, rows: list[list[list[int]]]) -> Batch:
        tokens = torch.tensor(
            [[token for conversation in row for token in conversation] for row in rows]
        )
        numbers = torch.tensor(
            [
                [number for number, conversation in enumerate(row) for _ in conversation]
                for row in rows
            ]
        )
        weights = torch.tensor(
            [[w for conversation in row for w in self._loss_weights(conversation)] for row in rows]
        )
        same = numbers[:, 1:] == numbers[:, :-1]
        inside = numbers[:, :-1]
        return Batch(
            tokens=tokens[:, :-1],
            targets=tokens[:, 1:],
            # The first token of a conversation cannot be predicted from the previous conversation.
            weights=weights[:, 1:] * same,
            mask=(inside[:, None, :, None] == inside[:, None, None, :]).tril(),
        )

    def _loss_weights(self, conversation: list[int]) -> list[float]:
        """Return the loss weight of each token. The tokens of answers have the largest weights."""
        weights: list[float] = []
        start = 0
        while start < len(conversation):
            answering = start > 0 and conversation[start - 1] == self._assistant
            stop = self._end if answering else self._assistant
            length = _index(conversation, stop, start) + 1 - start
            # The tokens of long answers get a smaller weight. Otherwise one story would have as
            # much weight as ten sums.
            weight = min(1.0, _FULL_LENGTH / length) ** 0.5
            weights += [weight] * length if answering else self._prompt_weights(length)
            if answering and (forced := self._forced_length(conversation[start : start + length])):
                weights[start : start + forced] = [0.0] * forced
            start += length
        return weights

    def _forced_length(self, answer: list[int]) -> int:
        """Return how many tokens at the start of the answer are forced by a grammar."""
        return max(len(start) for start in (*self._forced, []) if answer[: len(start)] == start)

    def _prompt_weights(self, length: int) -> list[float]:
        drawn = (self._rng.random() < _PROMPT_FRACTION for _ in range(length))
        return [PROMPT_WEIGHT if is_kept else 0.0 for is_kept in drawn]


def _id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None
    return number


def _casual(prompt: str) -> str:
    """Return the prompt with its first letter in lower case and without final punctuation."""
    return prompt[0].lower() + prompt[1:].rstrip("?.!")


def _index(tokens: list[int], wanted: int, start: int) -> int:
    """Return the index of the first token `wanted` at or after `start`.

    If `wanted` does not occur there, return the last index of `tokens`.
    """
    try:
        return tokens.index(wanted, start)
    except ValueError:
        return len(tokens) - 1
