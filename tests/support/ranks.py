"""Small models of several architectures, and workers of several ranks that run them."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import save_file

from penstock.common.sampling_params import SamplingParams
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.decoder import empty_decoder
from penstock.workers.models.spec import read_spec
from penstock.workers.rank.follower import Follower
from penstock.workers.scheduling.sequence import NewSequence

if TYPE_CHECKING:
    from penstock.workers.parallel.rendezvous import LocalStore

T = TypeVar("T")

VOCAB_SIZE = 157  # no number of ranks divides this prime

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "num_key_value_heads": 4},
    "falcon": {
        "architectures": ["FalconForCausalLM"],
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "bias": True,
        "ffn_hidden_size": 64,
    },
    "falcon-rw": {
        "architectures": ["FalconForCausalLM"],
        "hidden_size": 60,
        "num_attention_heads": 12,
        "alibi": True,
        "multi_query": False,
        "num_kv_heads": 12,
        "parallel_attn": False,
        "bias": True,
        "ffn_hidden_size": 64,
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"],
        "hidden_size": 36,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    "mpt": {
        "architectures": ["MptForCausalLM"],
        "hidden_size": 36,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "attn_config": {"clip_qkv": 2.0},
        "tie_word_embeddings": True,
    },
    "qwen2-moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 2,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 9,
        "rope_parameters": {"rope_type": "default"},
    },
    "deepseek": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
    },
    "deepseek-v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
    },
}


def make_model(folder: Path, name: str, **changes: Any) -> Path:
    """Write a checkpoint with random weights and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(COMMON | MODELS[name] | changes))
    shapes = empty_decoder(read_spec(folder), torch.float32, torch.device("meta")).tensors()
    numbers = torch.Generator().manual_seed(3)
    tensors = {
        tensor: torch.randn(shape.shape, generator=numbers) * 0.25
        for tensor, shape in shapes.items()
    }
    for tensor, values in tensors.items():
        if ("norm" in tensor or ".ln_" in tensor) and tensor.endswith("weight"):
            values += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def rank_config(model: Path, mesh: tuple[int, int, int] = (1, 1, 1), **more: Any) -> WorkerConfig:
    tp, pp, ep = mesh
    sizes: dict[str, Any] = {
        "kv_cache_mib": 4,
        "block_size": 4,
        "max_sequences": 8,
        "max_batched_tokens": 16,
        # This long limit only ends hangs: compilation on one rank may delay a collective.
        "ranks_seconds": 200.0,
    }
    return WorkerConfig(name="ranks", model=model, tp=tp, pp=pp, ep=ep, **(sizes | more))


@dataclass
class Answers:
    """The greedy answer to each prompt, and its logits [tokens, vocab_size]."""

    tokens: list[list[int]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


PROMPTS = [[5 + (11 * i * i + 3 * n) % 150 for i in range(length)] for n, length in
           enumerate((1, 3, 9, 30))]  # fmt: skip
NUM_NEW = 8


def answer(engine: Engine) -> Answers:
    """Answer all prompts in one batch, in steps of a few tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, logprobs=VOCAB_SIZE)
    for number, prompt in enumerate(PROMPTS):
        engine.submit(NewSequence(number, prompt, len(prompt), params))
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    logprobs: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
    while (result := engine.step()).output is not None:
        output = result.output
        for key, token, found in zip(output.keys, output.tokens, result.logprobs, strict=True):
            assert isinstance(key, int)
            assert found is not None
            tokens[key].append(int(token))
            row = torch.empty(VOCAB_SIZE)
            row[found.tokens] = torch.tensor(found.values)
            logprobs[key].append(row)
    return Answers(tokens, [torch.stack(rows) for rows in logprobs])


GAP = 1e-3
"""If the log-probabilities of two tokens differ by less than this, either token may be chosen."""


def agree(found: Answers, expected: Answers) -> None:
    """Check that answers agree up to the first position where two logits are nearly equal."""
    for ours, theirs, mine, right in zip(
        found.tokens, expected.tokens, found.logits, expected.logits, strict=True
    ):
        assert len(ours) == len(theirs)
        differing = [ours[i] != theirs[i] for i in range(len(ours))]
        same = differing.index(True) if True in differing else len(ours)
        torch.testing.assert_close(mine[:same], right[:same], rtol=1e-4, atol=1e-4)
        if same < len(ours):
            assert right[same][theirs[same]] - right[same][ours[same]] < GAP


def in_threads(num_ranks: int, work: Callable[[int, LocalStore], T]) -> list[T]:
    """Run `work(rank, store)` for every rank, each in a thread of this process."""
    # Import `LocalStore` here: its module imports grpc, which GPU machines may lack.
    from penstock.workers.parallel.rendezvous import LocalStore

    store = LocalStore()

    def guarded(rank: int) -> T:
        try:
            return work(rank, store)
        except BaseException:
            store.close("another rank failed")
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        return [each.result() for each in [threads.submit(guarded, r) for r in range(num_ranks)]]


def lead(config: WorkerConfig, store: LocalStore, use: Callable[[Engine], T]) -> T:
    """Run `use` on the engine of rank 0, then stop the engine."""
    engine = Engine(config, store=store)
    try:
        return use(engine)
    finally:
        engine.stop()


def follow(config: WorkerConfig, store: LocalStore) -> None:
    Follower(config, store, lambda done, total: None).run()
