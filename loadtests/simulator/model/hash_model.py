"""The hash model, in which each token is a hash of the contents of the KV slots that are read.

The slot of a position contains a hash of the position's token, the position itself and the value in
the previous position's slot. A sampled token is a hash of the values in all slots of the sequence,
read through the block table in order. A wrong block, a stale slot or a misordered write therefore
changes the answer. A constrained sequence draws from the tokens that its mask allows, so a wrong
mask changes the answer too.
"""

from collections.abc import Sequence

import numpy as np

from penstock.common.grammar.matcher import BITS, CompiledGrammar, Words
from penstock.common.sampling_params import SamplingParams
from penstock.common.thinking_budget import ThinkingBudget
from penstock.workers.sampling.token_masks import StepMasks
from penstock.workers.scheduling.sequence import FinishReason, Ints, StepPlan

_MODULUS = (1 << 61) - 1
VOCAB = 37


def slot_value(before: int, token: int, position: int) -> int:
    """Return the slot value of a position, given the slot value of the position before."""
    return ((before ^ 0x9E3779B97F4A7C15) * 6364136223846793 + token * 7919 + position) % _MODULUS


def hash_of(values: Sequence[int]) -> int:
    """Return a hash of a sequence's slot values. The hash determines the next token."""
    result = 1
    for value in values:
        result = (result * 1000003 + value) % _MODULUS
    return result


def _drawn(hashed: int, choice: int, count: int = VOCAB) -> int:
    return (hashed + choice * 0x632BE59BD9B4E019) % _MODULUS % count


def _drawn_allowed(hashed: int, choice: int, words: Words) -> int:
    """Return one of the tokens whose bits are set in `words` [W]."""
    if (words == -1).all():
        return _drawn(hashed, choice)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert len(allowed), "the token mask of a sequence allows no token: expected at least one"
    return int(allowed[_drawn(hashed, choice, len(allowed))])


def draw(
    hashes: Sequence[int],
    plan: StepPlan,
    choices: Ints | None = None,
    masks: StepMasks | None = None,
) -> Ints:
    """Return the tokens [S] of the plan's sampling rows, drawn from their `hashes` [S]."""
    drawing = plan.sampling_rows
    own = np.zeros_like(drawing) if choices is None else choices[drawing]
    drawn = [_drawn(hashed, choice) for hashed, choice in zip(hashes, own.tolist(), strict=True)]
    if masks is not None:
        for at, words in zip(masks.at.tolist(), masks.words, strict=True):
            drawn[at] = _drawn_allowed(hashes[at], int(own[at]), words)
    return np.array(drawn, np.int32)


class HashModel:
    """A model that runs step plans on a KV cache of `num_blocks` blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.kv = [-1] * (num_blocks * block_size)

    def run(
        self, plan: StepPlan, choices: Ints | None = None, masks: StepMasks | None = None
    ) -> Ints:
        """Copy blocks and write the step's slots; return the tokens [S] of the sampling rows.

        Args:
            choices: choice index of each row of the sequence table; None means 0 for all rows.
            masks: the tokens that constrained rows may draw.
        """
        return draw(self.hash(plan), plan, choices, masks)

    def hash(self, plan: StepPlan) -> list[int]:
        """Copy blocks and write the step's slots. Return the hashes [S] of the sampling rows."""
        hashes = []
        self.copy(plan.copies)
        for b in range(len(plan.rows)):
            span = range(int(plan.query_starts[b]), int(plan.query_starts[b + 1]))
            context = self.slots(plan.block_tables[b].tolist(), int(plan.context_lens[b]))
            for t in span:
                position = int(plan.positions[t])
                before = self.kv[context[position - 1]] if position else 0
                self.kv[int(plan.slots[t])] = slot_value(before, int(plan.tokens[t]), position)
            if plan.samples[b]:
                hashes.append(hash_of([self.kv[slot] for slot in context]))
        return hashes + [hashes[at] for at in plan.forks[:, 0]]

    def copy(self, pairs: Ints) -> None:
        """Copy blocks. `pairs` [C, 2] has the source and the destination of each copy.

        All sources are read before any destination is written.
        """
        for pair, content in [(pair, self._block(pair[0])) for pair in pairs.tolist()]:
            start = pair[1] * self.block_size
            self.kv[start : start + self.block_size] = content

    def _block(self, block: int) -> list[int]:
        return self.kv[block * self.block_size : (block + 1) * self.block_size]

    def slots(self, blocks: Sequence[int], length: int) -> list[int]:
        """Return the KV slots of the first `length` positions of a block table."""
        size = self.block_size
        return [blocks[p // size] * size + p % size for p in range(length)]

    def poison(self, blocks: Ints) -> None:
        """Fill blocks with values that give a wrong answer to any sequence that reads them."""
        for block in blocks.tolist():
            start = block * self.block_size
            self.kv[start : start + self.block_size] = [-2 - block] * self.block_size

    def slots_of(self, blocks: Ints) -> list[int]:
        """Return all KV slots of these blocks."""
        return self.slots(blocks.tolist(), len(blocks) * self.block_size)


def copy_blocks(source: HashModel, blocks: Ints, to: HashModel, into: Ints) -> None:
    """Copy blocks from the KV cache of one model to that of another, as a KV transfer does."""
    size = source.block_size
    for a, b in zip(blocks.tolist(), into.tolist(), strict=True):
        to.kv[b * size : (b + 1) * size] = source.kv[a * size : (a + 1) * size]


class _ConstrainedAnswer:
    """Draws the tokens of one answer with a matcher that advances once per token."""

    def __init__(self, params: SamplingParams, grammar: CompiledGrammar) -> None:
        self._params = params
        self._matcher = grammar.matcher()
        self._words = np.zeros(grammar.num_words, np.int32)
        self._length = 0

    def draw(self, hashed: int, choice: int) -> int:
        """Return the next token of the answer."""
        self._matcher.fill(self._words)
        if self._length < self._params.min_tokens and not self._matcher.is_complete:
            for stop in self._params.stop_token_ids:
                self._words[stop // BITS] &= ~np.int32(1 << stop % BITS)
        token = _drawn_allowed(hashed, choice, self._words)
        self._length += 1
        if not self._matcher.is_complete:
            self._matcher.advance([token])
        return token


class _Reasoning:
    """Reads an answer token by token and determines when the reasoning must end."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._answer: list[int] = []
        self._left: int | None = None if budget.start else budget.num_tokens
        self._is_over = False

    def add(self, token: int) -> None:
        """Take the next token of the answer."""
        self._answer.append(token)
        start = self._budget.start
        if self._left is not None:
            self._left -= 1
            self._is_over |= token == self._budget.end
        elif tuple(self._answer[-len(start) :]) == start:
            self._left = self._budget.num_tokens

    @property
    def must_end(self) -> bool:
        """True if the next token must be the end of the reasoning."""
        return self._left is not None and self._left <= 0 and not self._is_over


def reference_answer(
    prompt: Sequence[int],
    params: SamplingParams,
    max_model_len: int,
    choice: int = 0,
    grammar: CompiledGrammar | None = None,
) -> tuple[list[int], FinishReason]:
    """Compute the answer to a prompt directly from its tokens, without blocks or batches.

    Args:
        grammar: the compiled form of `params.structured_outputs`.
    """
    constrained = None if grammar is None else _ConstrainedAnswer(params, grammar)
    budget = params.thinking_budget
    reasoning = None if budget is None else _Reasoning(budget)
    values: list[int] = []
    for token in prompt:
        values.append(slot_value(values[-1] if values else 0, token, len(values)))
    answer: list[int] = []
    limit = params.answer_limit(len(prompt), max_model_len)
    while True:
        hashed = hash_of(values)
        token = _drawn(hashed, choice) if constrained is None else constrained.draw(hashed, choice)
        if reasoning is not None:
            if reasoning.must_end and budget is not None:
                token = budget.end
            reasoning.add(token)
        answer.append(token)
        may_stop = constrained is not None or len(answer) >= params.min_tokens
        if token in params.stop_token_ids and may_stop:
            return answer, FinishReason.STOP
        if len(answer) >= limit:
            return answer, FinishReason.LENGTH
        values.append(slot_value(values[-1], token, len(values)))
