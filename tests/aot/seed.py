"""Compile the kernels of some models ahead of time: `python -m tests.aot.seed FOLDER`.

The launches of a worker's warm-up are recorded on the "meta" device, so no weights, no memory and
no GPU are needed. In FOLDER, the kernels are stored under the keys that Triton uses to look them up
(`kernels/triton_common/kernel_cache.py`). The image build runs this command.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from penstock.common.grammar.matcher import num_words
from penstock.common.sampling_params import SamplingParams
from penstock.kernels.attention.backends.interface import HostBatch
from penstock.kernels.kv_cache.block_copy import copy_blocks, gather_blocks, scatter_blocks
from penstock.kernels.kv_cache.checksum import CHUNK, sum_words
from penstock.kernels.kv_cache.format import format_of
from penstock.kernels.sampling.logprobs import logprobs
from penstock.kernels.sampling.op import sample
from penstock.kernels.sampling.penalties import Penalties, add_logit_bias_, apply_penalties_
from penstock.kernels.sampling.token_mask import apply_token_mask_
from penstock.kernels.triton_common.launch import DeviceInfo, Launch, record_launches
from penstock.loadtests.gpu.models import SHAPES
from penstock.workers.config import LARGE_GPU_BYTES, WorkerConfig
from penstock.workers.engine.warm_up import warm_up_sequences
from penstock.workers.gpu.device_runner import DeviceRunner
from penstock.workers.gpu.graph_buckets import GraphBuckets
from penstock.workers.gpu.inputs import DecodeInputs, DeviceBatch
from penstock.workers.models import model_builder
from penstock.workers.models.decoder import empty_decoder
from penstock.workers.models.spec import read_spec
from penstock.workers.rank.kv_cache import KvCache
from penstock.workers.sampling.sampler import Sampler
from penstock.workers.scheduling.config import SchedulerConfig
from penstock.workers.weights.loading import choose_dtype
from tests.aot.case import SM_80, SM_89, SM_90, SM_100, meta
from tests.aot.compiling import compile_launch
from tests.support.specialized import specialization

ROOT = Path(__file__).resolve().parent.parent.parent
META = torch.device("meta")
CHIPS = (SM_80, SM_89, SM_90, SM_100)
NUM_BLOCKS = 999
NUM_PROCESSES = 2

GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"],
    "torch_dtype": "bfloat16",
}

MODELS: dict[str, dict[str, Any]] = {
    "demo": json.loads((ROOT / "penstock" / "models" / "demo" / "config.json").read_text()),
    "8b": SHAPES["8b"].config,
    "gpt-oss-20b": GPT_OSS_20B,
}
"""Configurations of the models whose kernels are compiled."""

Batches = Sequence[Sequence[int]]
"""For each step, the number of prompt tokens of each sequence."""


def record(name: str, chip: DeviceInfo, steps: Batches = ()) -> list[Launch]:
    """Return the launches of prefill `steps`, by default of the warm-up, one per specialization."""
    with (
        record_launches(chip) as launches,
        mock.patch.object(model_builder, "runs_kernels", return_value=True),
        torch.inference_mode(),
    ):
        runner, limits = runner_of(MODELS[name])
        if steps:
            for lengths in steps:
                compute_chunks(runner, lengths)
        else:
            _warm_up(runner, limits)
    return list({specialization(each): each for each in launches}.values())


def runner_of(config: dict[str, Any]) -> tuple[DeviceRunner, SchedulerConfig]:
    """Return a runner of the model (two layers, "meta" device) and the limits of a worker."""
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(config | {"num_hidden_layers": 2})
        (Path(folder) / "config.json").write_text(text)
        spec = read_spec(Path(folder))
    decoder = empty_decoder(spec, choose_dtype("auto", spec.dtype, META), META)
    own = WorkerConfig("w", ROOT).step_sizes(LARGE_GPU_BYTES)
    longest = spec.max_model_len
    limits = SchedulerConfig(
        NUM_BLOCKS, longest, own.block_size, own.max_sequences, own.max_batched_tokens
    )
    form = format_of(decoder.dtype)
    cache = KvCache(spec.num_layers, NUM_BLOCKS, own.block_size, spec.kv_shape, form, META)
    return DeviceRunner(decoder, cache, GraphBuckets(own.max_sequences, longest)), limits


def _warm_up(runner: DeviceRunner, limits: SchedulerConfig) -> None:
    """Launch a worker's warm-up kernels: captured decode steps, prompts, sampling, copies."""
    buckets = runner._buckets
    columns = -(-buckets.contexts[-1] // limits.block_size)
    inputs = DecodeInputs(buckets.rows[-1], columns, limits.block_size, NUM_BLOCKS - 1, META)
    for bucket in buckets.buckets():
        runner._prepare(inputs.padding_rows(bucket.rows))
        runner._compute(inputs.batch(bucket.rows, bucket.context))
    for new in warm_up_sequences(limits, compiles=True):
        compute_chunks(runner, [new.num_prompt])
    for rows in (1, limits.max_sequences):
        _sample_tokens(rows, runner.decoder.spec.vocab_size)
    _move_blocks(runner.cache.data)


def _move_blocks(kv: Tensor) -> None:
    """Launch the kernels of `warm_up_block_moves`, but do not read the value of a checksum."""
    first = meta(1, dtype=torch.int32)
    copy_blocks(kv, first.to(torch.int64), first.to(torch.int64))
    layers, heads = slice(0, kv.shape[0]), slice(0, kv.shape[3])
    staged = gather_blocks(kv, first, layers, heads)
    scatter_blocks(kv, first, layers, heads, staged)
    words = -(-staged.numel() * staged.itemsize // 8)
    sizes = words, CHUNK + 1, max(1 << 12, words)
    sum_words(*(meta(size, dtype=torch.int64) for size in sizes))


def compute_chunks(runner: DeviceRunner, lengths: Sequence[int]) -> None:
    """Run a step of prefill chunks, which no CUDA graph captures."""
    total, count, longest = sum(lengths), len(lengths), max(lengths)
    block_size = runner.cache.data.shape[4]

    def int32s(*shape: int) -> Tensor:
        return meta(*shape, dtype=torch.int32)

    ends, lens = np.cumsum([0, *lengths]).astype(np.int32), np.array(lengths, np.int32)
    runner._prepare(HostBatch(ends, lens, np.zeros((count, 0), np.int32)))
    runner._compute(
        DeviceBatch(
            tokens=int32s(total),
            positions=int32s(total),
            slots=int32s(total),
            query_starts=int32s(count + 1),
            context_lens=int32s(count),
            block_tables=int32s(count, -(-longest // block_size)),
            max_query=longest,
            max_context=longest,
        )
    )


def _sample_tokens(num_rows: int, vocab_size: int) -> None:
    """Launch the kernels of all sampling options."""
    logits, ids = meta(num_rows, vocab_size, dtype=torch.float32), meta(num_rows, dtype=torch.int64)
    sampler = Sampler(num_rows, vocab_size, META)
    for row in range(num_rows):
        sampler.admit(row, SamplingParams(temperature=1.0, top_p=0.9, top_k=5), 0)
    rows = np.arange(num_rows, dtype=np.int32)
    sample(logits, sampler._sampling_tensors(sampler._params[rows], rows))
    each = Penalties(*(meta(num_rows, dtype=torch.float32) for _ in range(3)))
    tokens = meta(num_rows, 7 * num_rows, dtype=torch.int64)
    apply_penalties_(logits, tokens, ids, ids, each)
    add_logit_bias_(logits, ids, ids, meta(num_rows, dtype=torch.float32))
    words = meta(num_rows, num_words(vocab_size), dtype=torch.int32)
    apply_token_mask_(logits, ids, words)
    logprobs(logits, ids, num_rows)


def compile_model(name: str, chip: DeviceInfo, folder: Path) -> set[str]:
    """Compile a model's kernels for a chip into `folder`; return their keys."""
    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder), TRITON_STORE_BINARY_ONLY="1"):
        return {compile_launch(launch, chip).hash for launch in record(name, chip)}


def main(words: Sequence[str] | None = None) -> int:
    chips = {chip.name: chip for chip in CHIPS}
    parser = argparse.ArgumentParser(description="Compile the kernels of models ahead of time.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--chips", nargs="+", choices=chips, default=list(chips))
    options = parser.parse_args(words)
    started = time.monotonic()
    jobs = [(name, chips[chip]) for name in options.models for chip in options.chips]
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(compile_model, *job, options.folder.absolute()) for job in jobs]
        keys = [future.result() for future in futures]
    for (name, chip), found in zip(jobs, keys, strict=True):
        print(f"{name} for {chip.name}: {len(found)} kernels")
    size = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    total = len(set().union(*keys))
    print(f"{total} kernels, {size >> 20} MiB, {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
