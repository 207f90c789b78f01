"""The tokens of a model in the form in which llguidance reads them."""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from penstock.common.text.tokenizer import ModelTokenizer

NO_PREFIX: Mapping[str, Mapping[str, Any]] = {
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
}
"""Fields of the steps that may add a space before a text."""


class GrammarTokens:
    """The bytes of all tokens, and the tokenization of forced text; llguidance reads the fields.

    If llguidance reads `tokenizer.json` itself, it takes each added token of the form `<...>` for a
    control token, which no text can contain. Many models mark calls and reasoning by such tokens
    (Qwen, DeepSeek, GLM).

    Args:
        tokenizer: the tokenizer of the model.
        end_token: a token that ends an answer.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: ModelTokenizer, end_token: int) -> None:
        token_bytes = tokenizer.token_bytes
        self.eos_token_id = end_token
        self.special_token_ids = sorted(token_bytes.special)
        self.tokens = list(map(token_bytes.bytes_of, range(tokenizer.vocab_size)))
        self._tokenizer = _continuing(tokenizer.tokenizer)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that continues an answer."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens


def _continuing(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer of text that is not at the start, and contains no control tokens."""
    spec = json.loads(tokenizer.to_str())
    for part in ("normalizer", "pre_tokenizer"):
        spec[part] = _without_prefix(spec[part])
    found = Tokenizer.from_str(json.dumps(spec))
    found.encode_special_tokens = True
    return found


def _without_prefix(step: Any) -> Any:
    """Return a step of `tokenizer.json` that adds no space before a text; None: nothing is left."""
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Sequence":
        (key,) = step.keys() - {"type"}
        kept = [each for each in map(_without_prefix, step[key]) if each is not None]
        return {**step, key: kept}
    return {**step, **NO_PREFIX.get(step["type"], {})}
