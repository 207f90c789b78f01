"""Runs loads against the engine and against a plain torch engine with the same weights.

- prefill: prompts of one length, one after another
- mixed: sequences decode, while prompts arrive one after another
- all at once: requests of mixed lengths that all arrive at the start, for the throughput
- arrivals: the same requests at random times, at a rate below the slower engine's throughput

Both engines replay the same requests with greedy sampling. The fraction of equal first tokens shows
whether the engines compute the same model. It is below 1 in 16-bit dtypes, because rounding changes
some tokens of a model with random weights.
"""

import gc
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.common.sampling_params import SamplingParams
from penstock.kernels.fallback import fallback_counts, forbid_fallback
from penstock.loadtests.gpu.models import SHAPES, random_model, small
from penstock.loadtests.gpu.options import Options, read_options
from penstock.loadtests.gpu.replay import (
    Answer,
    Prompt,
    Request,
    TokenEngine,
    replay,
    speed_ratios,
    summary,
)
from penstock.loadtests.gpu.sections import write_figures
from penstock.loadtests.gpu.torch_engine import MASK_MULTIPLE, TorchEngine, TorchModel
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine, make_stepper
from penstock.workers.models.decoder import Decoder
from penstock.workers.scheduling.sequence import NewSequence

LEAST_EQUAL = 0.5
"""Smallest fraction of equal first tokens. Rounding to bfloat16 changes about one token in ten of
random weights; a wrong KV cache or position changes nearly all."""

ARRIVALS_FRACTION = 0.7  # rate of arrivals, relative to the slower engine's requests per second
ALL_AT_ONCE, ARRIVALS = "all at once", "arrivals"
ENGINES = ("ours", "torch")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the loads."""

    prefills: tuple[int, ...] = (512, 2000, 8000)  # lengths of the prompts, in tokens
    num_prefills: int = 4
    num_decoding: int = 64
    decoding: tuple[int, int] = (256, 160)  # lengths of prompt and output, in tokens
    num_prompts: int = 8  # number of prompts that arrive while others decode
    prompt_len: int = 2000
    num_requests: int = 64
    # Prompt lengths are drawn uniformly between these bounds.
    prompt_lens: tuple[int, int] = (200, 1500)
    output_lens: tuple[int, int] = (32, 160)
    arrival_seconds: float = 12.0
    max_requests: int = 256  # maximum number of requests of the load "arrivals"
    max_batched_tokens: int = 8192
    kv_cache_mib: int = 20 << 10
    max_model_len: int = 8192


SMALL_SIZES = Sizes(
    (12, 40), 2, 2, (6, 10), 2, 20, 3, (5, 20), (2, 5), 3.0, 4, 64, kv_cache_mib=4, max_model_len=64
)


def make_loads(sizes: Sizes) -> dict[str, list[Request]]:
    """Return the requests of each load except "arrivals"."""
    loads = {
        f"prefill of {length}": [
            Request(length, 1, after=number - 1 if number else None)
            for number in range(sizes.num_prefills)
        ]
        for length in sizes.prefills
    }
    decoding = [Request(*sizes.decoding, background=True)] * sizes.num_decoding
    # The first prompt arrives once every decoding sequence has its first token.
    prompts = [
        Request(sizes.prompt_len, 1, after=sizes.num_decoding - 1 + number)
        for number in range(sizes.num_prompts)
    ]
    rng = np.random.default_rng(0)
    loads["mixed"] = decoding + prompts
    loads[ALL_AT_ONCE] = _random_requests(sizes, sizes.num_requests, rng)
    return loads


def make_arrivals(sizes: Sizes, rate: float) -> list[Request]:
    """Return requests with exponentially distributed gaps, `rate` per second."""
    rng = np.random.default_rng(1)
    count = min(sizes.max_requests, max(3, round(rate * sizes.arrival_seconds)))
    times = rng.exponential(1 / rate, count).cumsum().tolist()
    requests = _random_requests(sizes, count, rng)
    return [replace(each, arrival=at) for each, at in zip(requests, times, strict=True)]


def _random_requests(sizes: Sizes, count: int, rng: np.random.Generator) -> list[Request]:
    prompts = rng.integers(*sizes.prompt_lens, count, endpoint=True).tolist()
    outputs = rng.integers(*sizes.output_lens, count, endpoint=True).tolist()
    return [Request(*lengths) for lengths in zip(prompts, outputs, strict=True)]


class PenstockEngine:
    """The engine with its stepper. The stepper runs as in the thread of a worker."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self._changed = threading.Condition()
        self._stepper = make_stepper(engine, self._changed)
        self._commanded = False
        self._num_submitted = 0

    def submit(self, number: int, prompt: Prompt, max_tokens: int) -> None:
        self._num_submitted += 1
        # Different salts prevent prefix cache hits between requests.
        salt = f"{self._name}, {self._num_submitted}".encode()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self._engine.submit(NewSequence(number, prompt, len(prompt), params, salt=salt))
        self._commanded = True

    def advance(self) -> list[tuple[int, int]]:
        stepper = self._stepper
        with self._changed:
            self._changed.wait_for(lambda: stepper.due or not stepper.busy)
        result = stepper.advance(self._commanded)
        self._commanded = False
        if result.failed:
            raise RuntimeError(
                "a model with random weights gave logits that are NaN or infinite: expected "
                "finite numbers"
            )
        stepper.plan_next()
        if result.output is None:
            return []
        keys: list[Any] = result.output.keys
        return list(zip(keys, result.output.tokens.tolist(), strict=True))

    def stop(self) -> None:
        self._stepper.stop()


class Pair:
    """The engine and the plain torch engine, with the same weights."""

    def __init__(self, decoder: Decoder, options: Options, sizes: Sizes, folder: Path) -> None:
        self._decoder, self._sizes = decoder, sizes
        worker = WorkerConfig(
            name="gpu",
            model=folder,
            device=options.device.type,
            max_sequences=max(sizes.num_decoding + 1, sizes.num_requests),
            max_batched_tokens=sizes.max_batched_tokens,
            max_model_len=sizes.max_model_len,
            kv_cache_mib=sizes.kv_cache_mib,
        )
        self._engine = Engine(worker, decoder=decoder)
        self._engine.executor.on_device = self._engine.plans_ahead = True
        self._engine.warm_up()
        self._num_replays = 0

    def compare(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Replay a load against each engine. Return the figures of both, and their ratios."""
        rng = np.random.default_rng(len(requests))
        vocab = self._decoder.spec.vocab_size
        prompts = [rng.integers(2, vocab, each.prompt_len).tolist() for each in requests]
        answers = [self._by_penstock(requests, prompts), self._by_torch(requests, prompts)]
        ours, plain = (summary(requests, each) for each in answers)
        firsts = zip(*answers, strict=True)
        equal = np.mean([ours.tokens[0] == plain.tokens[0] for ours, plain in firsts])
        return {
            "ours": ours,
            "torch": plain,
            "ratios": speed_ratios(ours, plain),
            "equal_first_tokens": float(equal),
        }

    def _by_penstock(self, requests: Sequence[Request], prompts: Sequence[Prompt]) -> list[Answer]:
        self._engine.reset_scheduler(self._engine.limits)
        self._num_replays += 1
        engine = PenstockEngine(self._engine, f"load {self._num_replays}")
        try:
            return _replay_warm(engine, requests, prompts)
        finally:
            engine.stop()

    def _by_torch(self, requests: Sequence[Request], prompts: Sequence[Prompt]) -> list[Answer]:
        sizes = self._sizes
        rows = 1 if all(each.output_len == 1 for each in requests) else sizes.num_decoding + 1
        longest = max(each.prompt_len + each.output_len for each in requests)
        length = -(-longest // MASK_MULTIPLE) * MASK_MULTIPLE
        engine = TorchEngine(TorchModel(self._decoder, rows, length))
        try:
            return _replay_warm(engine, requests, prompts)
        finally:
            del engine  # releases the engine's KV cache
            gc.collect()


def _replay_warm(
    engine: TokenEngine, requests: Sequence[Request], prompts: Sequence[Prompt]
) -> list[Answer]:
    """Replay the first request alone, which initializes libraries, and then the whole load."""
    first = Request(requests[0].prompt_len, min(2, requests[0].output_len))
    replay(engine, [first], prompts[:1])
    return replay(engine, requests, prompts)


def measure(options: Options, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield the results so far after each load."""
    shape = SHAPES[options.model]
    config = small(shape.config) if options.small else shape.config
    loads: dict[str, Any] = {}
    failures: list[str] = []
    figures = {"about": shape.about, "loads": loads, "failures": failures}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder,
        forbid_fallback(options.device),
    ):
        decoder = random_model(Path(folder), config, options.dtype, options.device)
        pair = Pair(decoder, options, sizes, Path(folder))
        for name, requests in make_loads(sizes).items():
            loads[name] = pair.compare(requests)
            yield figures
        slower = min(loads[ALL_AT_ONCE][engine]["requests_per_second"] for engine in ENGINES)
        loads[ARRIVALS] = pair.compare(make_arrivals(sizes, ARRIVALS_FRACTION * slower))
    failures += [
        f"{name}: only {found['equal_first_tokens']:.0%} of the first tokens are equal"
        for name, found in loads.items()
        if found["equal_first_tokens"] < LEAST_EQUAL
    ]
    if fallback_counts():
        failures.append(f"kernel fallbacks were used: {fallback_counts()}")
    yield figures


def main() -> int:
    options = read_options("beside_torch")
    torch.manual_seed(0)
    for figures in measure(options, SMALL_SIZES if options.small else Sizes()):
        write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
