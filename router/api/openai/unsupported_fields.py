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
    # vLLM
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
    # llama.cpp
    "json_schema": (None,),
    "grammar": (None, ""),
    "n_predict": (None, -1),
    "mirostat": (None, 0),
    "dynatemp_range": (None, 0),
    "dry_multiplier": (None, 0),
    "xtc_probability": (None, 0),
}
"""Refused fields, each with its permitted values, which mean the same as no value."""


def check_unsupported_fields(fields: Mapping[str, Any]) -> None:
    """Raise an error for the first unknown field of a body that would change the answer."""
    for name, value in fields.items():
        if name in PERMITTED_VALUES and not any(value == one for one in PERMITTED_VALUES[name]):
            raise invalid(f"{name} is not supported: leave it out", name)
