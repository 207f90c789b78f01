"""Adapter for Penstock's engine alone, set up in this process as in a `mixed` worker."""

# ruff: noqa: E402  (`tune_process` must run before torch is imported)

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.workers.rank.process_tuning import tune_process

tune_process()  # must run before torch is imported, as in a worker process

import torch

import penstock
from penstock.common.sampling_params import SamplingParams
from penstock.kernels.kv_cache.format import format_of
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.scheduling.sequence import NewSequence


def _model(checkpoint: Path, form: str) -> Path:
    """Return the path of the model to load: a GGUF file for the form "f16", else `checkpoint`."""
    if form != "f16":
        return checkpoint
    import gguf_file

    return Path(gguf_file.converted(checkpoint, "f16"))


@contextmanager
def engine(options: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Load the model and yield `generate` and the description for the report."""
    form = options["form"]
    config = WorkerConfig(
        name="peers",
        model=_model(Path(options["model"]), form),
        threads=options["threads"],
        max_sequences=options["num_requests"],
        max_model_len=options["max_model_len"],
        dtype="float32",
        kv_cache_mib=1024 * options["kv_gib"],
        kv_cache_dtype=options["kv_cache_dtype"],
        **({"quantization": form} if form in ("int8", "int4") else {}),
    )
    engine = Engine(config)
    engine.warm_up()
    # Write to the whole KV cache before the measurement, so that page faults do not slow it.
    engine.cache.data.zero_()
    calls = 0

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        nonlocal calls
        calls += 1
        params = SamplingParams(temperature=0.0, max_tokens=output_len)
        answers: list[list[int]] = [[] for _ in prompts]
        for number, prompt in enumerate(prompts):
            # Each call has its own salt, so that no call reuses cached blocks of an earlier call.
            salt = calls.to_bytes(8, "little")
            engine.submit(NewSequence(number, prompt, len(prompt), params, salt=salt))
        left = len(prompts)
        while left:
            result = engine.step()
            if result.failed:
                raise RuntimeError(
                    "the model's logits contain NaN or infinity: expected finite numbers"
                )
            if result.output is not None:
                for key, token in zip(result.output.keys, result.output.tokens, strict=True):
                    answers[int(str(key))].append(int(token))
            left -= len(result.finished)
        return answers

    yield (
        generate,
        {
            "version": penstock.__version__,
            "torch": torch.__version__,
            "weights": form or "fp32",
            "kv": format_of(engine.cache.data.dtype).name,
            "prefix_cache": "never hit (unique salt per call)",
        },
    )
