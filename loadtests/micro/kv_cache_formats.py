"""Compares the formats of the KV cache by error of attention, time of attention, and answers.

`python -m penstock.loadtests.micro.kv_cache_formats` prints a line per format.

- Error of attention: the root mean square of (output - exact output), divided by that of the exact
  output. The exact output is computed in float64 from the keys and values before they were rounded.
  Keys and values are random. With outliers, one feature in 32 of every head is multiplied by 16,
  because keys of real models have such features. The step has one token and a long context.
- Time of attention: the CPU time of one thread for a step of several sequences, relative to
  float32. The formats take turns in each round, and each figure is the minimum over the rounds.
- Answers: greedy answers to random prompts, compared with the answers with a float32 cache.
  The figures are the fraction of equal answers, and the mean fraction of an answer before its first
  different token.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from penstock.common.sampling_params import SamplingParams
from penstock.kernels.attention.op import (
    paged_attention,
    paged_attention_reference,
    plan_attention,
)
from penstock.kernels.kv_cache.format import FORMATS, to_cache
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.micro.ab_runner import run
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.scheduling.sequence import NewSequence

NAMES = ("bfloat16", "int8", "fp8")
BLOCK_SIZE = 16
OUTLIER_EVERY, OUTLIER_GAIN = 32, 16.0
PATTERNS = (
    "What is {a} + {b}?",
    "What is {a} - {b}?",
    "Which number is larger, {a} or {b}?",
    "Sort the numbers {b}, {a}, {c} and {d}.",
    "Tell me a story about {a} foxes and {b} hens.",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of the measurement."""

    model: str = option("penstock/models/demo", "folder of the model that answers")
    prompts: int = option(200, "number of prompts")
    output_len: int = option(48, "tokens of each answer")
    context: int = option(1024, "positions that attention reads")
    head_dim: int = option(128, "features per head")
    batch: int = option(16, "sequences of the timed step")
    rounds: int = option(7, "rounds of the timed step")
    seed: int = option(0, "seed of keys, values, queries and prompts")
    save_json: str = option("", "write the results to this file")


def features(options: Options, has_outliers: bool) -> Tensor:
    """Return keys and values [2, N, H, S, D]. One sequence has N x S positions."""
    generator = torch.Generator().manual_seed(options.seed)
    num_blocks = -(-options.context // BLOCK_SIZE)
    found = torch.randn(2, num_blocks, 8, BLOCK_SIZE, options.head_dim, generator=generator)
    if has_outliers:
        found[..., ::OUTLIER_EVERY] *= OUTLIER_GAIN
    return found


def attention_error(options: Options, name: str, has_outliers: bool) -> float:
    """Return the relative error of attention over a cache of the format `name`."""
    exact_layer = features(options, has_outliers)
    layer = to_cache(exact_layer, FORMATS[name])
    generator = torch.Generator().manual_seed(options.seed + 1)
    query = torch.randn(1, 32, options.head_dim, generator=generator)
    tables = np.arange(layer.shape[1], dtype=np.int32)[None]
    batch = np.array([0, 1], np.int32), np.array([options.context], np.int32), tables
    found = paged_attention(query, layer, plan_attention(*batch, layer)).double()
    exact = paged_attention_reference(query.double(), exact_layer.double(), *batch)
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def attention_seconds(options: Options) -> dict[str, float]:
    """Return the CPU seconds of attention in one step, by format."""
    one = features(options, has_outliers=False)
    num_blocks, calls = one.shape[1], {}
    starts = np.arange(options.batch + 1, dtype=np.int32)
    contexts = np.full(options.batch, options.context, np.int32)
    tables = np.random.default_rng(0).permutation(options.batch * num_blocks).astype(np.int32)
    query = torch.randn(options.batch, 32, options.head_dim)
    for name in ("float32", *NAMES):
        layer = to_cache(one.repeat(1, options.batch, 1, 1, 1), FORMATS[name])
        plan = plan_attention(starts, contexts, tables.reshape(options.batch, -1), layer)
        calls[name] = partial(paged_attention, query, layer, plan)
    least = dict.fromkeys(calls, np.inf)
    # The first round compiles the loops and does not count.
    for number in range(options.rounds + 1):
        for name, call in calls.items():
            began = time.thread_time()
            call()
            if number:
                least[name] = min(least[name], time.thread_time() - began)
    return least


def prompts(options: Options) -> list[list[int]]:
    """Return the token ids of random prompts."""
    rng, tokenizer = Random(options.seed), Tokenizer.from_file(f"{options.model}/tokenizer.json")
    texts = [
        rng.choice(PATTERNS).format(**{name: rng.randrange(2, 999) for name in "abcd"})
        for _ in range(options.prompts)
    ]
    return [tokenizer.encode(text).ids for text in texts]


def answers(options: Options, name: str) -> list[list[int]]:
    """Return the greedy answers of an engine with a cache of the format `name`."""
    config = WorkerConfig("engine", Path(options.model), kv_cache_dtype=name, kv_cache_mib=64)
    engine = Engine(config)
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len)
    found: list[list[int]] = []
    for number, tokens in enumerate(prompts(options)):
        engine.submit(NewSequence(number, tokens, len(tokens), params))
        found.append([])
    while (result := engine.step()).output is not None:
        output = result.output
        for key, token in zip(output.keys, output.tokens.tolist(), strict=True):
            found[int(str(key))].append(token)
    return found


def equal_fraction(found: Sequence[int], expected: Sequence[int]) -> float:
    """Return the fraction of `expected` before the first token that differs."""
    pairs = enumerate(zip(found, expected, strict=False))
    shorter = min(len(found), len(expected))
    return next((at for at, (a, b) in pairs if a != b), shorter) / len(expected)


async def _measure(options: Options) -> dict[str, Any]:
    torch.set_num_threads(1)
    seconds = attention_seconds(options)
    expected = answers(options, "float32")
    results: dict[str, Any] = {}
    for name in NAMES:
        plain, outliers = (attention_error(options, name, more) for more in (False, True))
        found = answers(options, name)
        pairs = list(zip(found, expected, strict=True))
        fractions = [equal_fraction(*pair) for pair in pairs]
        results[name] = {
            "attention_error": plain,
            "attention_error_with_outliers": outliers,
            "attention_time": seconds[name] / seconds["float32"],
            "equal_answers": sum(a == b for a, b in pairs) / len(pairs),
            "equal_fraction": sum(fractions) / len(fractions),
        }
        print(name, *(f"{key} {value:.4f}" for key, value in results[name].items()), flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program = "python -m penstock.loadtests.micro.kv_cache_formats"
    about = "Formats of the KV cache: error and time of attention, and greedy answers."
    (options,) = read_flags(program, about, (Options,), arguments)
    return run(lambda: _measure(options), dataclasses.asdict(options), options.save_json)


if __name__ == "__main__":
    sys.exit(main())
