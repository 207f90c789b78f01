"""Plans the lengths, arrival times and prompts of a load. All are derived from a seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

TRACE_BLOCK = 512
"""Number of prompt tokens that one hash id of a trace represents."""

MAX_BLOCK_ID = 2**32 - 1

# Half-width of the central 95% of a normal distribution, in standard deviations.
_CENTRAL_95 = 1.959964
# Numbers of the random streams (see `_generator`).
_LENGTHS, _ARRIVALS, _BLOCKS, _SINGLES, _PREFIXES = range(5)


class Prefix(NamedTuple):
    """A shared prefix: prompts with equal `number` begin with the same `num_tokens` tokens."""

    number: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send."""

    number: int
    due: float  # time of sending, in seconds after the start of the load
    input_len: int  # number of prompt tokens
    output_len: int  # number of answer tokens
    blocks: tuple[int, ...] = ()  # ids of the prompt's blocks; empty if the trace has none
    prefix: Prefix | None = None  # shared prefix, whose tokens `input_len` includes
    text: str = ""  # prompt from a dataset, for which `input_len` is an estimate


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of token counts between `low` and `high`, both included."""

    low: int
    high: int
    kind: Literal["uniform", "lognormal"] = "uniform"

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parse `128`, `64-256` (uniform) or `lognormal:64-256`.

        The bounds of a lognormal distribution enclose its central 95%. Values outside the bounds
        are clipped. Raises ValueError.
        """
        head, colon, bounds = text.rpartition(":")
        low, _, high = bounds.partition("-")
        kind = head if colon else "uniform"
        try:
            lengths = (int(low), int(high or low))
        except ValueError:
            lengths = (0, 0)
        if kind not in ("uniform", "lognormal") or not 1 <= lengths[0] <= lengths[1]:
            raise ValueError(
                f"invalid length {text!r}: expected N, LOW-HIGH or lognormal:LOW-HIGH with "
                "1 <= N and 1 <= LOW <= HIGH, such as 64-256"
            )
        return cls(*lengths, kind="lognormal" if kind == "lognormal" else "uniform")

    def draw(self, count: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return `count` random lengths."""
        if self.kind == "uniform":
            return random.integers(self.low, self.high, size=count, endpoint=True)
        low, high = math.log(self.low), math.log(self.high)
        drawn = random.lognormal((low + high) / 2, (high - low) / 2 / _CENTRAL_95, size=count)
        return np.clip(np.rint(drawn).astype(np.int64), self.low, self.high)


class TraceRow(NamedTuple):
    """One request of a trace file."""

    at: float  # time in seconds after the start of the trace
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()  # hash ids of the prompt's blocks; empty if the trace has none


def _generator(seed: int, stream: int, item: int = 0) -> np.random.Generator:
    """Return a random generator.

    Generators of different (seed, stream, item) are independent.
    """
    return np.random.Generator(np.random.Philox(key=[seed, stream << 40 | item]))


def arrivals(count: int, rate: float, seed: int) -> npt.NDArray[np.float64]:
    """Return arrival times in seconds, [count]: a Poisson process with `rate` requests per second.

    The times are scaled so that the last time is exactly count / rate, as in `vllm bench serve`.
    The offered load is then the same for every seed. With an infinite rate all times are 0.
    """
    if math.isinf(rate) or count == 0:
        return np.zeros(count)
    gaps = _generator(seed, _ARRIVALS).exponential(1 / rate, size=count)
    times: npt.NDArray[np.float64] = np.cumsum(gaps)
    return times * float(count / rate / times[-1])


def drawn_load(
    count: int, rate: float, inputs: Lengths, outputs: Lengths, seed: int
) -> list[Planned]:
    """Plan `count` requests of random lengths whose prompts share no prefixes."""
    random = _generator(seed, _LENGTHS)
    input_lens, output_lens = inputs.draw(count, random), outputs.draw(count, random)
    columns = zip(arrivals(count, rate, seed), input_lens, output_lens, strict=True)
    return [
        Planned(number, float(due), int(input_len), int(output_len))
        for number, (due, input_len, output_len) in enumerate(columns)
    ]


def with_prefixes(plan: Sequence[Planned], num_tokens: int, count: int) -> list[Planned]:
    """Prepend one of `count` shared prefixes of `num_tokens` tokens to each prompt, in turn."""
    return [
        replace(
            planned,
            input_len=num_tokens + planned.input_len,
            prefix=Prefix(planned.number % count, num_tokens),
        )
        for planned in plan
    ]


def traced_load(rows: Sequence[TraceRow], times: Sequence[float]) -> list[Planned]:
    """Plan the requests of a trace. Request i is sent at `times[i]` (seconds)."""
    return [
        Planned(number, float(due), row.input_len, row.output_len, row.blocks)
        for number, (row, due) in enumerate(zip(rows, times, strict=True))
    ]


def capped(row: TraceRow, max_input: int | None, max_output: int | None) -> TraceRow:
    """Limit the lengths of a trace request, and drop the block ids beyond the limited prompt."""
    input_len = min(row.input_len, max_input or row.input_len)
    output_len = min(row.output_len, max_output or row.output_len)
    blocks = row.blocks[: -(-input_len // TRACE_BLOCK)]
    return TraceRow(row.at, input_len, output_len, blocks)


def ordinary_tokens(vocab_size: int) -> range:
    """Return the token ids from which prompts are drawn, without special tokens.

    Special tokens are at the two ends of a vocabulary. Excluding 1/40 of the vocabulary at each end
    removes the special tokens of Llama, Mistral, Qwen and Gemma.
    """
    margin = max(8, vocab_size // 40)
    if vocab_size < 4 * margin:
        raise ValueError(
            f"a vocabulary of {vocab_size} tokens is too small to draw prompts from: expected at "
            f"least {4 * margin}"
        )
    return range(margin, vocab_size - margin)


class Prompts:
    """Generates prompts on demand, because all prompts of a trace would not fit in memory."""

    def __init__(self, vocabulary: range, seed: int) -> None:
        self._vocabulary = vocabulary
        self._seed = seed
        self._num_digits = math.ceil(math.log(MAX_BLOCK_ID + 1, len(vocabulary)))

    def tokens(self, planned: Planned) -> list[int]:
        """Return a request's token ids [input_len], determined by plan, seed and vocabulary.

        Two prompts with block ids have equal tokens in the blocks before the first different id,
        and differ within the first few tokens of that block.
        """
        if planned.prefix is not None:
            number, num_tokens = planned.prefix
            shared: list[int] = self._draw(_PREFIXES, number, num_tokens).tolist()
            return shared + self._fresh(planned.number, planned.input_len - num_tokens)
        if not planned.blocks:
            return self._fresh(planned.number, planned.input_len)
        chain = np.concatenate([self._block(block) for block in planned.blocks])
        tokens: list[int] = chain[: planned.input_len].tolist()
        return tokens

    def warmup(self, number: int, input_len: int) -> list[int]:
        """Return the token ids [input_len] of a prompt that no request of the load has."""
        return self._fresh(MAX_BLOCK_ID - number, input_len)

    def _fresh(self, number: int, input_len: int) -> list[int]:
        tokens: list[int] = self._draw(_SINGLES, number, input_len).tolist()
        return tokens

    def _block(self, block: int) -> npt.NDArray[np.int64]:
        """Return the token ids [TRACE_BLOCK] of a block: its id in digits, then random tokens.

        The digits are those of the id in base `len(vocabulary)`, lowest first. They ensure that
        blocks with different ids differ.
        """
        tokens = self._draw(_BLOCKS, block, TRACE_BLOCK)
        for position in range(self._num_digits):
            block, digit = divmod(block, len(self._vocabulary))
            tokens[position] = self._vocabulary[digit]
        return tokens

    def _draw(self, stream: int, item: int, count: int) -> npt.NDArray[np.int64]:
        low, high = self._vocabulary.start, self._vocabulary.stop
        return _generator(self._seed, stream, item).integers(low, high, size=count)
