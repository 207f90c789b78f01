"""Fields of OpenAI and of other engines that are refused, because they would change the answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.router.errors import invalid

PERMITTED_VALUES: Mapping[str, Sequence[Any]] = {
    # OpenAI
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
    "moderation": (None,),
    "verbosity": (None, "medium"),
    "prompt_cache_options": (None, {}, {"mode": "implicit"}),
    # OpenAI's Responses API
    "instructions": (None,),
    "max_output_tokens": (None,),
    "reasoning": (None, {}),
    # vLLM
    "add_special_tokens": (None, False),  # of chats, whose template writes the special tokens
    "lora_request": (None,),
    "repetition_detection": (None,),
    "truncation_side": (None, "left"),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "logprob_token_ids": (None,),
    "prompt_embeds": (None,),
    "prompt_token_ids": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "include_reasoning": (None, True),
    "thinking_token_budget": (None,),
    "logits_processors": (None, []),
    "detokenize": (None, True),
    "kv_transfer_params": (None,),
    "vllm_xargs": (None, {}),
    # SGLang
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, []),
    "custom_logit_processor": (None,),
    "lora_path": (None,),
    "no_stop_trim": (None, False),
    "separate_reasoning": (None, True),
    "stream_reasoning": (None, True),
    "session_params": (None,),
    "extra_key": (None,),
    "custom_params": (None,),
    "max_new_tokens": (None,),
    "min_new_tokens": (None, 0),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "data_parallel_rank": (None,),
    "return_hidden_states": (None, False),
    # llama.cpp
    "lora": (None, []),
    "n_probs": (None, 0),
    "reasoning_format": (None, "auto", "deepseek"),
    "repeat_penalty": (None, 1),
    "samplers": (None, []),
    "t_max_predict_ms": (None, 0),
    "top_n_sigma": (None, -1),
    "json_schema": (None,),
    "grammar": (None, ""),
    "n_predict": (None, -1),
    "mirostat": (None, 0),
    "dynatemp_range": (None, 0),
    "dry_multiplier": (None, 0),
    "xtc_probability": (None, 0),
    # TGI
    "adapter_id": (None,),
    "do_sample": (None, True),
    "tool_prompt": (None,),
    "watermark": (None, False),
    # Ollama
    "format": (None, ""),
    "options": (None, {}),
    "think": (None,),
    # hosted models that can reason
    "enable_thinking": (None,),
    "thinking": (None,),
    "thinking_budget": (None,),
}
"""Refused fields, each with its permitted values, which mean the same as no value."""

CHAT_FIELDS: dict[str, tuple[Any, ...]] = {
    "max_completion_tokens": (None,),
    "top_logprobs": (None, 0),
    "reasoning_effort": (None,),
}
"""Fields of chats that completions do not have, each with the values that change nothing."""


def check_unsupported_fields(fields: Mapping[str, Any]) -> None:
    """Raise an error for the first unknown field of a body that would change the answer."""
    for name, value in fields.items():
        if name in PERMITTED_VALUES and not any(value == one for one in PERMITTED_VALUES[name]):
            raise invalid(f"{name} is not supported: leave it out", name)


def check_chat_fields(fields: Mapping[str, Any]) -> None:
    """Raise an error if the unknown fields of a completion contain a field of chats."""
    for name, permitted in CHAT_FIELDS.items():
        if fields.get(name) not in permitted:
            raise invalid(
                f"{name} is a field of /v1/chat/completions, but not of /v1/completions: leave it "
                "out",
                name,
            )
