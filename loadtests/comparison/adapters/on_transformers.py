"""Adapter for `transformers` with one static batch of equal lengths, its best case.

The tokens of other engines are compared with those of transformers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers


@contextmanager
def engine(options: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Load the model and yield `generate` and the description for the report."""
    torch.set_num_threads(options["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=transformers.GenerationConfig(
                    do_sample=False,
                    max_new_tokens=output_len,
                    min_new_tokens=output_len,
                    eos_token_id=None,
                    pad_token_id=0,
                ),
            )
        return [list(row[tokens.shape[1] :]) for row in output.tolist()]

    yield (
        generate,
        {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "weights": "fp32",
            "kv": "float32",
            "batching": "static, equal lengths",
        },
    )
