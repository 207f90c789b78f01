"""Measures the time to fill token masks for large vocabularies, and the cost for other streams.

`python -m penstock.loadtests.micro.token_masks` makes three measurements:

- Filling: the vocabularies are byte-level ones of random words, and those of `--ranks`. The
  benchmark draws random answers of some JSON Schemas, and measures the thread's CPU time to fill
  each mask.
- Other streams: it decodes with the bundled model, alternately without constraints and with
  constraints on half of the sequences. It compares the CPU time per token.
- Forced tokens: it generates answers of a schema, alternately with one forced token and with
  several per step. It compares steps and CPU time.
"""

import json
import random
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.common.grammar.matcher import GrammarVocabulary, num_words
from penstock.common.sampling_params import SamplingParams
from penstock.common.structured_outputs import StructuredOutputs, json_schema
from penstock.common.text.token_bytes import byte_alphabet
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.workload import Planned, Prompts, ordinary_tokens
from penstock.loadtests.micro.ab_runner import Setup, run
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.sampling.token_masks import MAX_FORCED
from penstock.workers.scheduling.sequence import NewSequence

END = "<|end|>"

_TEXT: dict[str, Any] = {"type": "string", "maxLength": 200}
_ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {"sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, "note": _TEXT},
    "required": ["sku", "note"],
    "additionalProperties": False,
}
_NUMBER: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 5}
SCHEMAS: Sequence[dict[str, Any]] = (
    {"type": "object", "properties": {"answer": _TEXT}, "required": ["answer"]},
    {
        "type": "object",
        "properties": {
            **{f"field_{index}": _TEXT for index in range(6)},
            "kind": {"enum": ["order", "offer", "return"]},
            "score": _NUMBER,
            "items": {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": 4},
            "when": {"type": "string", "format": "date-time"},
        },
        "required": ["kind", "score", "items", "when"],
        "additionalProperties": False,
    },
)


RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 20},
        "shipping_address": {"type": "string", "maxLength": 40},
        "payment_method": {"enum": ["credit card", "bank transfer", "invoice"]},
        "number_of_items": {"type": "integer", "minimum": 1, "maximum": 99},
        "is_express_delivery": {"type": "boolean"},
    },
    "additionalProperties": False,
}
RECORD["required"] = list(RECORD["properties"])
"""A schema with realistic property names, to measure the number of steps of an answer."""


@dataclass(frozen=True, slots=True)
class Load:
    """Vocabularies and answers of a measurement."""

    tokens: int = option(400, "tokens of each answer whose masks are measured")
    answers: int = option(6, "answers of each schema and vocabulary")
    concurrency: int = option(16, "sequences that decode together")
    output_len: int = option(64, "tokens of each sequence")
    rounds: int = option(5, "runs of each mode")
    ranks: tuple[str, ...] = option((), "files of js-tiktoken (dist/ranks/*.cjs): vocabularies")


def write_vocabulary(folder: Path, size: int, seed: int = 0) -> None:
    """Write a byte-level tokenizer of `size` tokens: bytes, numbers, JSON and random words."""
    numbers = random.Random(seed)
    vocab = {char: index for index, char in enumerate(byte_alphabet())}
    space = next(char for char, byte in byte_alphabet().items() if byte == ord(" "))
    for piece in _pieces(numbers, space):
        vocab.setdefault(piece, len(vocab))
        if len(vocab) == size - 1:
            break
    _write(folder, vocab)


def write_ranks(folder: Path, file: Path) -> int:
    """Write a byte-level tokenizer with the tokens of a js-tiktoken file; return its size.

    The file assigns a JSON object. Each line of the value `bpe_ranks` has a sign, the first rank,
    and the base64 tokens from that rank on.
    """
    text = file.read_text()
    ranks = json.JSONDecoder().raw_decode(text, text.index("{"))[0]["bpe_ranks"]
    chars = {byte: char for char, byte in byte_alphabet().items()}
    vocab: dict[str, int] = {}
    for line in ranks.splitlines():
        _, first, *tokens = line.split(" ")
        for rank, token in enumerate(tokens, int(first)):
            vocab["".join(chars[byte] for byte in b64decode(token))] = rank
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise ValueError(
            f"{file}: expected each rank from 0 to {len(vocab) - 1} exactly once, but ranks are "
            "missing or repeated"
        )
    _write(folder, vocab)
    return len(vocab) + 1


def _write(folder: Path, vocab: dict[str, int]) -> None:
    """Write a tokenizer that has the tokens of `vocab` and an end token."""
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))


def _pieces(numbers: random.Random, space: str) -> Iterator[str]:
    """Yield numbers, pieces of JSON punctuation, and then random words endlessly."""
    yield from (f"{number:0{digits}}" for digits in (2, 3) for number in range(10**digits))
    signs = ('{"', '":', '",', '"}', "[{", "}]", '":"', '","', '"},', "}}", "]}", '{"')
    yield from (lead + sign for sign in signs for lead in ("", space))
    syllables = [
        c + v + e for c in "bcdfghklmnprstvz" for v in "aeiou" for e in ("", "n", "r", "s")
    ]
    while True:
        word = "".join(numbers.choices(syllables, k=numbers.choice((1, 2, 2, 3, 3, 4))))
        yield numbers.choice(("", space, space)) + numbers.choice((word, word.capitalize()))


def fill_times(vocabulary: GrammarVocabulary, schema: dict[str, Any], load: Load) -> list[float]:
    """Return the CPU seconds to fill each mask along random answers."""
    grammar, times = vocabulary.compile(json_schema(schema)), list[float]()
    words = np.zeros(num_words(vocabulary.tokens.vocab_size), np.int32)
    for seed in range(load.answers):
        numbers, matcher = random.Random(seed), grammar.matcher()
        for _ in range(load.tokens):
            began = time.thread_time()
            matcher.fill(words)
            times.append(time.thread_time() - began)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            token = int(numbers.choice(np.flatnonzero(bits)))
            if matcher.is_complete or not matcher.advance([token]):
                break
    return times


def measure_fills(load: Load, sizes: Sequence[int]) -> dict[str, Any]:
    """For each vocabulary, measure the time to build it, to compile schemas and to fill masks.

    The vocabularies are one of random words for each of `sizes`, and one for each js-tiktoken file
    in `load.ranks`.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in sizes:
            write_vocabulary(folder, size)
            found[str(size)] = _fill_figures(load, folder, size)
        for file in map(Path, load.ranks):
            size = write_ranks(folder, file)
            found[file.stem] = _fill_figures(load, folder, size)
    for key, figures in found.items():
        print(f"{key}: {json.dumps(figures)}")
    return found


def _fill_figures(load: Load, folder: Path, size: int) -> dict[str, Any]:
    """Return the times to build a vocabulary, to compile a schema and to fill masks."""
    tokenizer = ModelTokenizer(folder)
    began = time.thread_time()
    vocabulary = GrammarVocabulary(tokenizer, size, [size - 1])
    built, began = time.thread_time() - began, time.thread_time()
    vocabulary.compile(json_schema(SCHEMAS[1]))
    compiled = time.thread_time() - began
    times = np.concatenate([fill_times(vocabulary, schema, load) for schema in SCHEMAS]) * 1e6
    return {
        "tokens": size,
        "vocabulary_s": built,
        "compile_ms": compiled * 1e3,
        "masks": len(times),
        "fill_p50_us": float(np.percentile(times, 50)),
        "fill_p99_us": float(np.percentile(times, 99)),
    }


def measure_others(setup: Setup, load: Load) -> dict[str, Any]:
    """Return the CPU time per token of an unconstrained batch and of a half constrained batch.

    The time of the threads that fill masks is returned separately, as `masks_us`. `ratio` does not
    include this time.
    """
    engine = Engine(WorkerConfig("masks", setup.model_folder, threads=setup.threads))
    engine.warm_up()
    wanted = StructuredOutputs("regex", "[a-z ]{10000}")
    grammar = engine.grammars.compile(wanted)
    prompts = Prompts(ordinary_tokens(engine.spec.vocab_size), 0)
    costs: dict[str, list[tuple[float, float]]] = {"plain": [], "half": []}
    for number in range(2 * load.rounds + 2):
        mode = list(costs)[number % 2]
        for index in range(load.concurrency):
            is_constrained = mode == "half" and index % 2 == 0
            key = number * load.concurrency + index
            tokens = prompts.tokens(Planned(key, 0.0, 16, load.output_len))
            params = SamplingParams(
                seed=key,
                max_tokens=load.output_len,
                structured_outputs=wanted if is_constrained else None,
            )
            own = grammar if is_constrained else None
            engine.submit(NewSequence(key, tokens, len(tokens), params, grammar=own))
        began, began_here, num_tokens = time.process_time(), time.thread_time(), 0
        while (output := engine.step().output) is not None:
            num_tokens += len(output.keys)
        if number >= 2:  # the first run of each mode is a warm-up
            spent, here = time.process_time() - began, time.thread_time() - began_here
            costs[mode].append((spent / num_tokens * 1e6, (spent - here) / num_tokens * 1e6))
    (plain, others), (half, with_masks) = (np.median(each, axis=0) for each in costs.values())
    # CPU time of the mask threads, without other threads of the engine.
    masks = float(with_masks - others)
    found = {"plain_us": float(plain), "half_us": float(half), "masks_us": masks}
    found["ratio"] = float((half - masks) / plain)
    print(f"processor time per token, half of the batch constrained: {json.dumps(found)}")
    return found


def measure_forced(setup: Setup, load: Load) -> dict[str, Any]:
    """Return steps and CPU time per answer, without and with extra forced tokens.

    With extra forced tokens, each step may append at most `MAX_FORCED` of them.
    """
    engine = Engine(WorkerConfig("masks", setup.model_folder, threads=setup.threads))
    engine.warm_up()
    wanted = json_schema(RECORD)
    grammar = engine.grammars.compile(wanted)
    prompts = Prompts(ordinary_tokens(engine.spec.vocab_size), 0)
    costs: dict[int, list[tuple[float, float]]] = {0: [], MAX_FORCED: []}
    for number in range(2 * load.rounds + 2):
        most = list(costs)[number % 2]
        engine.executor.sampler.masks.max_forced = most
        began, num_steps = time.process_time(), 0
        for index in range(load.answers):  # the requests run one at a time
            tokens = prompts.tokens(Planned(index, 0.0, 16, 1))
            params = SamplingParams(seed=index, max_tokens=400, structured_outputs=wanted)
            params = params.with_end_tokens(engine.spec.eos_tokens)
            engine.submit(NewSequence(number, tokens, len(tokens), params, grammar=grammar))
            while engine.step().output is not None:
                num_steps += 1
        if number >= 2:  # the first run of each mode is a warm-up
            spent = time.process_time() - began
            costs[most].append((num_steps / load.answers, spent / load.answers * 1e3))
    found = {
        str(most): {"steps": float(steps), "cpu_ms": float(cpu)}
        for most, (steps, cpu) in ((most, np.median(each, axis=0)) for most, each in costs.items())
    }
    print(f"forced tokens of a step, per answer: {json.dumps(found)}")
    return found


async def _measure(setup: Setup, load: Load) -> dict[str, Any]:
    fills = measure_fills(load, (100_000, 200_000))
    others = measure_others(setup, load)
    return {"fills": fills, "others": others, "forced": measure_forced(setup, load)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program = "python -m penstock.loadtests.micro.token_masks"
    setup, load = read_flags(program, "Filling of token masks.", (Setup, Load), arguments)
    config = {**asdict(setup), **asdict(load)}
    return run(lambda: _measure(setup, load), config, setup.save_json)


if __name__ == "__main__":
    sys.exit(main())
